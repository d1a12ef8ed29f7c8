"""A step's items and the KV index: what is reserved before the step runs, and what it has made of each item. Pure.

Every engine that counts its blocks in a `KvPool` begins a step with `reserve` and ends it with `finish` or `cancel` per item.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.worker.engine.kv_pool import KvPool, Reservation
from services.worker.engine.protocol import (
    STEP_ITEMS_MAX,
    EngineError,
    ItemResult,
    PrefillItem,
    PrefillStep,
    Token,
)


class Reserved(NamedTuple):
    """One item with its slots. The step computes the prompt's tokens `cached_tokens` … `end_tokens` - 1: none, if the worker
    held as much as the step was to compute. `begun` if an earlier step has taken the slots."""

    item: PrefillItem
    reservation: Reservation
    cached_tokens: int
    end_tokens: int
    begun: bool

    @property
    def ends_prompt(self) -> bool:
        """Whether the step chooses the first token."""
        return self.end_tokens == len(self.item.tokens)


def reserve(pool: KvPool, step: PrefillStep) -> list[Reserved]:
    """Slots for every item of a step, or for none: after an error items that are new hold nothing, and unfinished ones what
    they held. Errors: those of `KvPool.reserve`, and EngineError for what `check_items` finds."""
    check_items(step, pool.block_tokens)
    reserved: list[Reserved] = []
    try:
        for item in step.items:
            reserved.append(_reserved(pool, step, item))
    except EngineError:
        fail(pool, reserved)
        raise
    return reserved


def check_items(step: PrefillStep, block_tokens: int) -> None:
    """EngineError for a number of items or an `until` out of bounds, or a chain that comes back to a block of its own."""
    requests = {item.request for item in step.items}
    if not 1 <= len(step.items) <= STEP_ITEMS_MAX or len(requests) < len(step.items):
        raise EngineError(
            f"items: {len(step.items)} of {len(requests)} requests; a step has 1 to {STEP_ITEMS_MAX}, once each"
        )
    for item in step.items:
        _check_until(item, block_tokens)
        if len(set(item.chain)) < len(item.chain):
            raise EngineError(
                f"chain: {len(item.chain)} ids, of them {len(set(item.chain))} different; a prompt has each block once"
            )


def fail(pool: KvPool, items: Iterable[Reserved]) -> None:
    """The step has failed: what was new holds nothing, unfinished prompts what they held."""
    for reserved in items:
        if not reserved.begun:
            pool.release(reserved.item.request)


def _check_until(item: PrefillItem, block_tokens: int) -> None:
    until, prompt_tokens = item.until, len(item.tokens)
    if until is not None and (until % block_tokens or not 0 < until < prompt_tokens):
        raise EngineError(f"until: {until} is no multiple of {block_tokens} inside a prompt of {prompt_tokens} tokens")


def _reserved(pool: KvPool, step: PrefillStep, item: PrefillItem) -> Reserved:
    begun = pool.reservation(item.request) is not None
    reservation = pool.reserve(item.request, step.group, item.chain, len(item.tokens))
    cached_tokens = reservation.reused_blocks * pool.block_tokens
    end_tokens = len(item.tokens) if item.until is None else max(item.until, cached_tokens)
    return Reserved(item, reservation, cached_tokens, end_tokens, begun)


def finish(pool: KvPool, reserved: Reserved, first_token: Token | None) -> ItemResult:
    """The step has computed the item's share. `first_token` is there if and only if that ends the prompt."""
    assert (first_token is not None) == reserved.ends_prompt, f"{reserved.item.request}: a first token ends a prompt"
    request, cached_tokens, end_tokens = reserved.item.request, reserved.cached_tokens, reserved.end_tokens
    stored = pool.commit(request, end_tokens)
    return ItemResult(
        request=request,
        cached_tokens=cached_tokens,
        computed_tokens=end_tokens - cached_tokens,
        first_token=first_token,
        stored=stored,
        outcome="finished" if reserved.ends_prompt else "unfinished",
    )


def cancel(pool: KvPool, reserved: Reserved, computed: bool) -> ItemResult:
    """Nobody wants the item any more. If its share was `computed`, the whole blocks are kept."""
    request, cached_tokens = reserved.item.request, reserved.cached_tokens
    end_tokens = reserved.end_tokens if computed else cached_tokens
    stored = pool.commit(request, end_tokens)
    pool.release(request)
    return ItemResult(request, cached_tokens, end_tokens - cached_tokens, None, stored, "cancelled")
