"""What scans gave up before they said by which rules they choose (`CacheScanCompleted.rules` 1): records of then verify.

Candidates were nodes below which nobody at all held anything (`first_tips.py`); a bounded number of the oldest was looked at,
and only then sorted; a worker that a copy read from lost nothing; an ancestor went along unless somebody held another child.
"""

from collections.abc import Iterable

from services.cachemgr.node import INDEX, Candidate
from services.cachemgr.reclaiming import Coldest
from services.cachemgr.view import View
from shared.contracts.copy_commands import COPY_BLOCKS_MAX
from shared.contracts.events import ReplicationRequested
from shared.model.lattice import DEGREES
from shared.model.pool import Worker


class FirstRules:
    """As `reclaiming.Rules`. The view's trie keeps first tips."""

    def __init__(self, view: View, chosen: Iterable[ReplicationRequested]) -> None:
        assert view.trie.first_tips is not None, "whoever derives decisions of before keeps what they were made on"
        self._view, self._tips = view, view.trie.first_tips
        self._lending = {source for each in view.operations.open.values() for source in each.asked.sources}
        self._lending.update(source for each in chosen for source in each.sources)
        self._busy = {(each.asked.z, each.asked.worker) for each in view.operations.reclaiming.values()}
        self._busy |= view.operations.resting.keys()

    def coldest(self, limit: int, *, spare: bool) -> Coldest:
        trie, found = self._view.trie, []
        for node in self._tips.oldest(limit, spare=spare):
            for degree, replicas, access in zip(DEGREES, node.replicas, trie.demand(node).access, strict=True):
                if replicas > spare and access < replicas * trie.limits.reclaim:
                    found.append(Candidate(node, degree, replicas, access / replicas))
        return Coldest(sorted(found, key=lambda each: (each.score, each.node.block)), 0)

    def worker(self, candidate: Candidate) -> Worker | None:
        view, block = self._view, candidate.node.block
        holding = [each for each in view.holding(block, candidate.degree) if view.evicts(each)]
        fullest = max(
            (each for each in holding if each.id not in self._lending),
            key=lambda each: (view.pressure(each), each.id),
            default=None,
        )
        return fullest if fullest is not None and (block, fullest.id) not in self._busy else None

    def take(self, candidate: Candidate, worker: Worker) -> int:
        trie, index, blocks = self._view.trie, INDEX[worker.degree], 0
        for each in candidate.node.upwards():
            wanted = trie.demand(each).access[index] >= each.replicas[index] * trie.limits.reclaim
            if blocks and (wanted or self._tips.below[each.block] > 1 or blocks == COPY_BLOCKS_MAX):
                break
            blocks += 1
        return blocks
