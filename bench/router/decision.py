"""A whole decision in the router's process: matched, priced, chosen, and made into the events that are recorded."""

import random
from collections.abc import Callable

from bench.router.pool import BenchPool, chain_of, prompt
from bench.router.timing import HEADING, side_by_side
from shared.contracts.ids import BlockId
from shared.model.blocks import Tokens

ROUNDS = 200
POOLS = ((8, 64), (64, 64), (64, 512), (1_000, 64))
"""Workers and block size."""

HOLDERS = 64
DEPTHS = 8


def decision() -> None:
    """A prompt of 64K tokens that 64 workers hold to 8 depths, in an idle pool and one with a request waiting per worker."""
    for workers, block_tokens in POOLS:
        print(f"\ndecision, {workers} workers, blocks of {block_tokens} tokens\n{HEADING}")
        things: dict[str, Callable[[], object]] = {}
        for policy in ("paper", "vertumnus"):
            for waiting in (0, workers):
                chance = random.Random(4)
                pool = BenchPool(workers, block_tokens, policy)
                pool.load(chance, waiting)
                tokens = prompt(chance)
                chain = chain_of(tokens, block_tokens)
                for index, worker in enumerate(pool.workers[:HOLDERS]):
                    pool.hold(worker, chain[: len(chain) * (index % DEPTHS + 1) // DEPTHS])
                things |= _things(f"{policy}, {waiting} waiting", pool, tokens, chain)
        side_by_side(things, ROUNDS)


def _things(case: str, pool: BenchPool, tokens: Tokens, chain: tuple[BlockId, ...]) -> dict[str, Callable[[], object]]:
    def from_ids() -> object:
        return pool.decide(pool.arrival("x", chain_of(tokens, pool.block_tokens)))

    hashed = pool.arrival("x", chain)
    return {f"{case}, hashed": lambda: pool.decide(hashed), f"{case}, from token ids": from_ids}
