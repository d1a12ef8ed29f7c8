"""llm-d's endpoint picker: scores from several scorers, weighted and added; the highest wins, equals are drawn from.

Source: llm-d-inference-scheduler 0.8.0. `deploy/config/epp-precise-prefix-cache-config.yaml` weighs the exact prefix index 2,
KV utilisation 1 and the queue 1. Scorers and picker: `pkg/epp/framework/plugins/scheduling/{scorer,picker}`.
"""

from collections.abc import Callable, Sequence
from random import Random

from shared.contracts.ids import WorkerId
from simulation.baselines.rule import Forgetful, Prompt, WorkerView

PREFIX_WEIGHT, KV_WEIGHT, QUEUE_WEIGHT = 2, 1, 1

WAITING_MAX = 128
"""The scorer of load tells no longer queues apart."""

STARTS_TOKENS = {1: 0, 2: 4_096, 4: 8_192, 8: 32_768}
"""The lengths that a degree is for begin here. Prompts below 4K are faster without context parallelism, and CP4 pays from 8K
(sgl-project/sglang issue 37944, measured); above 32K a prompt is long (paper, section 5)."""


class PreciseScorers(Forgetful):
    """The part of the prompt's blocks that is cached, the free part of KV memory, and how short the queue is between the
    shortest and the longest one."""

    name = "llm-d"

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """The best sum."""
        queued = [each.queued_requests for each in workers]
        shortest, longest = min(queued), max(queued)

        def score(worker: WorkerView) -> float:
            prefix = worker.cached_blocks / len(prompt.chain) if prompt.chain else 0.0
            room = 1 - worker.running_blocks / worker.capacity_blocks
            queue = (longest - worker.queued_requests) / (longest - shortest) if longest > shortest else 1.0
            return PREFIX_WEIGHT * prefix + KV_WEIGHT * room + QUEUE_WEIGHT * queue

        return _best(workers, score, self._chance)


class LengthBuckets(Forgetful):
    """Each degree has a fixed range of prompt lengths: `context-length-aware` as a filter, then `load-aware-scorer`. A degree
    that is not there leaves its range to the next smaller one or, if there is none, to the smallest."""

    name = "length-buckets"

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def choose(self, prompt: Prompt, workers: Sequence[WorkerView]) -> WorkerId | None:
        """Of the workers for this length, one with the shortest queue."""
        degrees = sorted({each.degree for each in workers})
        wanted = max((each for each in degrees if STARTS_TOKENS[each] <= prompt.tokens), default=degrees[0])
        fitting = [each for each in workers if each.degree == wanted]
        return _best(fitting, lambda each: -min(each.queued_requests, WAITING_MAX), self._chance)


def _best(workers: Sequence[WorkerView], score: Callable[[WorkerView], float], chance: Random) -> WorkerId:
    scores = [score(each) for each in workers]
    highest = max(scores)
    return chance.choice([each.worker for each, found in zip(workers, scores, strict=True) if found == highest])
