"""What the pool's engines cannot do is refused by name before the request is received. Pure."""

from services.router.offers import Offer
from services.router.openai import BadRequest
from services.router.sampling_fields import SamplingFields

WITH_GRAMMARS = frozenset({"sglang"})
"""Engines that can bind an answer to a JSON schema."""


def check(asked: SamplingFields, offer: Offer) -> None:
    """Errors: BadRequest names the field and the engine."""
    if asked.json_schema is not None and (lacking := sorted(offer.engines - WITH_GRAMMARS)):
        _refuse("response_format", f"only type text, because the {lacking[0]} engine of this pool has no grammars")
    if asked.ignore_eos and asked.stop_token_ids and "sglang" in offer.engines:
        _refuse("stop_token_ids", "the sglang engine of this pool ignores them where ignore_eos is set")


def _refuse(field: str, why: str) -> None:
    raise BadRequest(f"invalid '{field}': {why}", field, "unsupported_value")
