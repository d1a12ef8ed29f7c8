"""Rules that every textbook and nearly every load balancer has."""

from collections.abc import Sequence
from random import Random

from shared.contracts.ids import WorkerId
from simulation.baselines.rule import Forgetful, Prompt, WorkerView


class RoundRobin(Forgetful):
    """Workers take turns, whoever they are. When workers come or go, the turn goes on from where it was."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """The next one."""
        chosen = workers[self._turn % len(workers)]
        self._turn += 1
        return chosen.worker


class LeastTokens(Forgetful):
    """The worker with the fewest outstanding tokens that it has to compute; of equals the first. The same by predicted time
    is the router's own `least-work`."""

    name = "least-tokens"

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """The least `uncached_tokens`."""
        return min(workers, key=lambda each: each.uncached_tokens).worker


class PowerOfTwo(Forgetful):
    """Of two different workers drawn at random, the one with fewer outstanding requests; of equals the first drawn.

    Mitzenmacher, The power of two choices in randomized load balancing (IEEE TPDS 12(10), 2001).
    """

    name = "power-of-two"

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """The less busy of two."""
        drawn = self._chance.sample(workers, min(2, len(workers)))
        return min(drawn, key=lambda each: each.outstanding_requests).worker


class CentralQueue(Forgetful):
    """One queue, first come first served: a prompt waits at the router until a worker is idle, and goes to the idle worker
    with the longest prefix of it, the highest degree, the first. Nothing waits at a worker, and nothing is misjudged: an
    upper bound for rules that look at load alone, were it not that it never leaves a short prompt to a busy fast worker.
    """

    name = "central-fcfs"

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """An idle one, or None."""
        idle = [each for each in workers if not each.outstanding_requests]
        return max(idle, key=lambda each: (each.cached_blocks, each.degree)).worker if idle else None
