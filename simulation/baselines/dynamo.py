"""NVIDIA Dynamo's KV router, as it places prefills on a pool of prefill workers.

Source: Dynamo 1.6.1, `lib/kv-router/src/scheduling/selector.rs` and `config.rs`: overlap credit 1, no credit decay, prefill
load scale 1, no weight for active requests, temperature 0. Its router for prefill workers counts no active blocks
(`lib/llm/src/kv_router/prefill_router`), and so does this. Caches are known by events, as in our views.
"""

from collections.abc import Sequence
from random import Random

from shared.contracts.ids import WorkerId
from simulation.baselines.rule import Forgetful, Prompt, WorkerView


class KvCost(Forgetful):
    """The fewest blocks to compute before the first token: all that the outstanding requests have to compute, and the prompt
    less what the worker has cached. At temperature 0 that is an exact minimum; equals are drawn from."""

    name = "dynamo-kv"

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """The cheapest."""
        costs = [cost_tokens(prompt, each) for each in workers]
        least = min(costs)
        return self._chance.choice([each.worker for each, cost in zip(workers, costs, strict=True) if cost == least])


def cost_tokens(prompt: Prompt, worker: WorkerView) -> int:
    """Their cost times the tokens of a block, so that it is whole."""
    return worker.uncached_tokens + prompt.tokens - worker.cached_blocks * prompt.block_tokens
