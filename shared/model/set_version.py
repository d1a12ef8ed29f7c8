"""The version of a set of coefficients, which events name: a name, and for sets that were fitted a digest of the numbers.

Other numbers cannot have the same version, and a file whose numbers were changed by hand is noticed when it is loaded: what was
decided with it could not be told from what was decided with the set that it pretends to be.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b

import orjson
from pydantic import BaseModel, ConfigDict, Field

DIGEST_BYTES = 4
_DIGEST = re.compile(rf"-([0-9a-f]{{{2 * DIGEST_BYTES}}})$")
COEFFICIENTS = ("d", "a", "b", "c", "alpha", "g")


class _Numbers(BaseModel):
    """What the digest is of."""

    model_config = ConfigDict(extra="ignore")

    version: str
    d: float
    a: float
    b: float
    c: float
    alpha: float
    g: float = 0.0
    capacity_shares: dict[int, float] = Field(default_factory=dict)


def named(name: str, values: Mapping[str, float], shares: Mapping[int, float]) -> str:
    """A version out of a name and the numbers. `name` is brought into the form of the names that ship."""
    return f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}-{_digest(values, shares)}"


def name_of(version: str) -> str:
    """Without the digest, if it has one."""
    return _DIGEST.sub("", version)


def check_version(raw: bytes) -> None:
    """ValueError if the version of a set, in JSON with all its fields, ends in a digest and that is not of its numbers."""
    numbers = _Numbers.model_validate_json(raw)
    said = _DIGEST.search(numbers.version)
    found = _digest({each: getattr(numbers, each) for each in COEFFICIENTS}, numbers.capacity_shares)
    if said is not None and said.group(1) != found:
        raise ValueError(
            f"version: {numbers.version!r} is not of these numbers, whose digest is {found}: they were changed after they"
            " were fitted. Fit again, or give the set a version that does not end in a digest"
        )


def _digest(values: Mapping[str, float], shares: Mapping[int, float]) -> str:
    content = orjson.dumps([sorted(values.items()), sorted(shares.items())])
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
