"""The demand of the policy `regret`: what routing lost because the worker it would have liked best lacked the prefix.

When a request is placed at price J, let J* be the least price that any priced worker w* would have had if it had held all that
somebody holds of the prompt. J - J* is charged, in equal shares, to the blocks that w* lacks, at its degree. It fades, so what
is left speaks for the coming seconds. Algorithm 1 charges what a degree would have saved; this charges what was really lost,
queues and the price of GPUs included, and nothing where a copy would have changed nothing.

All of it follows from the event alone: the best worker of each degree is among the recorded candidates.
"""

from typing import NamedTuple

from services.cachemgr.demand import block_tokens_at
from services.cachemgr.trie import Trie
from shared.contracts.events import PricedCandidate, RequestAssigned
from shared.contracts.ids import BlockId, WorkerId
from shared.model.blocks import reusable_tokens
from shared.model.cost import US_PER_S, Coefficients
from shared.model.holders import Holders
from shared.model.pool import Pool


class Regret(NamedTuple):
    """`worker` would have taken the request for `lost_us` less, had it held the whole prefix."""

    worker: WorkerId
    degree: int
    lost_us: int


def count(trie: Trie, holders: Holders, pool: Pool, coefficients: Coefficients, data: RequestAssigned) -> None:
    """Add what one first attempt says. Later ones come from failures, not from demand."""
    block_tokens = block_tokens_at(pool, data.worker)
    if data.attempt != 1 or not block_tokens:
        return
    prompt_tokens = data.uncached_tokens + data.cached_tokens
    chain = holders.chains.get(data.request, ())
    chain = chain[: reusable_tokens(len(chain), block_tokens, prompt_tokens) // block_tokens]
    prefix = chain[: trie.matched(chain)]
    for block in prefix:
        trie.noticed(trie.nodes[block])
    found = regret(coefficients, data, len(prefix) * block_tokens)
    if found is None:
        return
    missing: list[BlockId] = list(prefix[holders.matched(prefix).get(found.worker, 0) :])
    for block in missing:
        trie.missed(trie.nodes[block], found.degree, found.lost_us / len(missing) / US_PER_S)


def regret(coefficients: Coefficients, data: RequestAssigned, prefix_tokens: int) -> Regret | None:
    """None if no worker would have been cheaper with `prefix_tokens` of the prompt cached."""
    if not data.candidates or not data.beta:
        return None  # `least-work` looks at queues alone: no prefix would have changed its mind
    prompt_tokens = data.uncached_tokens + data.cached_tokens
    smallest = min(each.degree for each in data.candidates)

    def price_us(each: PricedCandidate) -> int:
        """Its price if it had held the prefix: what it pays to wait stays as it is."""
        predicted_us, smallest_us = (
            coefficients.prefill_us(degree, prompt_tokens - prefix_tokens, prefix_tokens)
            for degree in (each.degree, smallest)
        )
        service_us = round(each.ratio * predicted_us)
        if data.ratio_in_own_time:
            weighed_us = service_us + round((data.beta - 1) * predicted_us)
        else:
            predicted_us, smallest_us = service_us, round(each.ratio * smallest_us)
            weighed_us = round(data.beta * service_us)
        occupancy_us = round(data.lam * (each.degree * predicted_us - smallest * smallest_us))
        return each.queue_us + each.delay_us + weighed_us + occupancy_us

    lost_us, best = max(((data.candidates[0].price_us - price_us(each), each) for each in data.candidates), key=_first)
    return Regret(best.worker, best.degree, lost_us) if lost_us > 0 else None


def _first(pair: tuple[int, PricedCandidate]) -> int:
    return pair[0]
