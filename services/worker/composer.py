"""What the next step of a worker computes: whole short prompts packed together, a long one chunk by chunk. Pure.

Rules of `compose`:

1.  Candidates are asked in the queue's order. A step computes at most `step_tokens_max` uncached tokens of at most
    `items_max` requests.
2.  A prompt with more than `chunk_tokens` uncached tokens gives the step one chunk, which ends at a block. Whatever does not
    fit into what is left of the budget waits for the next step; it is not cut smaller. As a chunk fits into every budget,
    the head of the queue is always served, and nobody waits longer than the steps of those before him.
3.  Whoever joins a step keeps those who are in it already waiting for what he adds, and saves the step's constant for himself
    and for everyone behind. He joins if that is worth it: added × those in the step ≤ constant × (1 + those behind). So a
    long queue is packed and a short one is served one by one (ADR 22).
4.  Of requests that share a prefix which the worker does not hold yet, one goes and the others wait for the step after: the
    engine would compute it once for each of them.
5.  Under `fcfs` a step is the whole prompt of the head and nothing else, which is what the paper's policy prices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.worker.job import Job
from services.worker.step_cost import WorkerCost
from shared.contracts.ids import BlockId
from shared.model.blocks import reusable_tokens
from shared.model.parameters import WorkerOrder


class StepLimits(NamedTuple):
    """Uncached tokens of one step, and of one prompt in it. A chunk is at least a block and at most a step."""

    step_tokens_max: int
    chunk_tokens: int


class Share(NamedTuple):
    """One request's part of a step: `cached_tokens` are expected to be reused, and it goes up to `until` or to the end."""

    job: Job
    cached_tokens: int
    until: int | None

    @property
    def end_tokens(self) -> int:
        return self.job.assign.prompt_tokens if self.until is None else self.until

    @property
    def uncached_tokens(self) -> int:
        return self.end_tokens - self.cached_tokens


def compose(
    candidates: Sequence[Job],
    cached_blocks: Callable[[Job], int],
    order: WorkerOrder,
    limits: StepLimits,
    items_max: int,
    block_tokens: int,
    cost: WorkerCost,
) -> list[Share]:
    """The next step's items, at least one if there is a candidate. `cached_blocks` is what the worker holds of a chain now."""
    shares: list[Share] = []
    coming: set[BlockId] = set()
    left_tokens = limits.step_tokens_max
    for index, job in enumerate(candidates):
        if len(shares) == items_max or left_tokens <= 0:
            break
        held_blocks = cached_blocks(job)
        cached_tokens = reusable_tokens(held_blocks, block_tokens, job.assign.prompt_tokens)
        if order == "fcfs":
            return [Share(job, cached_tokens, None)]
        missing = job.chain[held_blocks] if held_blocks < len(job.chain) else None
        share = _share(job, cached_tokens, limits.chunk_tokens, block_tokens)
        if missing in coming or share.uncached_tokens > left_tokens:
            continue
        added_us = cost.adds_us(share.uncached_tokens, cached_tokens)
        if added_us * len(shares) > cost.constant_us * (len(candidates) - index):
            continue
        shares.append(share)
        left_tokens -= share.uncached_tokens
        if missing is not None:
            coming.add(missing)
    return shares


def _share(job: Job, cached_tokens: int, chunk_tokens: int, block_tokens: int) -> Share:
    if job.assign.prompt_tokens - cached_tokens <= chunk_tokens:
        return Share(job, cached_tokens, None)
    return Share(job, cached_tokens, (cached_tokens + chunk_tokens) // block_tokens * block_tokens)
