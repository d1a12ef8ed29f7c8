"""Which replicas a scan gives up: Algorithm 2's third list (model, 2.4), as a path each. Pure.

    reclaim       a degree C has z, and access < r · θ_reclaim:  access / r, rising
    reclaimed     at the holder of degree C with the fullest cache that holds nothing below z
    with it       what is above z there, as far as it is as little wanted and holds up nothing else there

Of equals the one whose node was demanded, or became an end of what somebody holds, longest ago comes first; of workers that
are as full the one with the higher id. A pair (z, C) gives up one replica at a time, whether as an operation's z or on its
path: what is wanted of a prefix that two workers have may be one copy. What a copy reads from, and what it goes on from at its
destination, stays, and so does what an agent would not give up during the last `REST_SCANS` scans.

Under `regret` reclamation needs a full cache, a second copy and a cold minute.

A scan looks at a bounded number of pairs. What it has passed over for want of a worker that gives it up goes to the end of the
line when the scan is folded (`passed`), so that the next one goes on behind it.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple, Protocol

from services.cachemgr.node import INDEX, Candidate, Node
from services.cachemgr.reclamation import Excess
from services.cachemgr.replication import OPEN_MAX
from services.cachemgr.trie import Trie
from services.cachemgr.view import SECOND, View
from shared.contracts.copy_commands import COPY_BLOCKS_MAX
from shared.contracts.events import ReplicationRequested
from shared.contracts.ids import BlockId, WorkerId
from shared.model.lattice import DEGREES
from shared.model.pool import Worker

LOOK_PER_OPERATION = 16
"""Cold pairs looked at for each reclamation that may be chosen."""

KEPT_MAX = 4_096
"""Cold pairs of one scan passed over for being only where nothing is given up, as at a cordoned node: 6 ms for few workers."""

PRESSURE_MIN = 0.9
COLD_S = 60.0


class Coldest(NamedTuple):
    """The first candidates of a line. `passed`: how many of its nodes were looked at, where that was as far as a scan goes."""

    candidates: list[Candidate]
    passed: int


class Reclamations(NamedTuple):
    """The replicas to give up, and how much of the line was passed over for want of more of them."""

    chosen: list[Excess]
    passed: int


class Rules(Protocol):
    """What may go. Of before there are others (`first_rules.py`)."""

    def coldest(self, limit: int, *, spare: bool) -> Coldest:
        """The first of those that are reclaimable; `spare`: that a degree has more than once."""

    def worker(self, candidate: Candidate) -> Worker | None:
        """The one that gives it up."""

    def take(self, candidate: Candidate, worker: Worker) -> int:
        """How many blocks go with it, itself included. They are going from now on."""


def reclamations(view: View, scan: int, rules: Rules) -> Reclamations:
    """What `scan` gives up, which names it."""
    found: list[Excess] = []
    if view.parameters.cache_policy == "lru" or view.parameters.frozen:
        return Reclamations(found, 0)
    limit = max(0, min(view.parameters.cache_operations_max, OPEN_MAX - len(view.operations.reclaiming)))
    paper = view.parameters.cache_policy == "paper"
    quiet_scans = COLD_S / view.parameters.scan_every_s
    candidates, passed = rules.coldest(limit * LOOK_PER_OPERATION, spare=not paper)
    for candidate in candidates:
        if not paper and view.trie.scan - candidate.node.stamp < quiet_scans:
            continue
        worker = rules.worker(candidate)
        if worker is not None and (paper or view.pressure(worker) >= PRESSURE_MIN):
            name, blocks = f"reclaim-{scan}-{len(found) + 1}", rules.take(candidate, worker)
            found.append(Excess(name, candidate.node.block, worker.id, blocks, candidate.score))
        if len(found) == limit:
            return Reclamations(found, 0)
    return Reclamations(found, passed)


class PresentRules:
    """Those of this version. `chosen` are the copies of the same scan."""

    def __init__(self, view: View, chosen: Iterable[ReplicationRequested]) -> None:
        self._view = view
        self._going = {
            (node.block, view.trie.degrees.get(each.asked.worker))
            for each in view.operations.reclaiming.values()
            for node in islice(_upwards(view.trie, each.asked.z), each.asked.blocks)
        }
        copies = [*(each.asked for each in view.operations.open.values()), *chosen]
        self._needed = {needed for each in copies for needed in _needed_by(view.trie, each)}
        workers = view.pool.workers.values()
        giving = [each for each in workers if self._gives_up(each)]
        self._giving = {degree: {each.id for each in giving if each.degree == degree} for degree in DEGREES}
        self._all_give = len(giving) == len(workers)

    def coldest(self, limit: int, *, spare: bool) -> Coldest:
        if not any(self._giving.values()):
            return Coldest([], 0)
        return coldest(self._view.trie, limit, self._is_given_up, spare=spare)

    def worker(self, candidate: Candidate) -> Worker | None:
        view, node = self._view, candidate.node
        if (node.block, candidate.degree) in self._going:
            return None
        ends = [
            each
            for each in view.holding(node.block, candidate.degree)
            if view.trie.tips.is_end(each.id, node.block)
            and view.evicts(each)
            and (node.block, each.id) not in self._needed
            and (node.block, each.id) not in view.operations.resting
        ]
        return max(ends, key=lambda each: (view.pressure(each), each.id), default=None)

    def _gives_up(self, worker: Worker) -> bool:
        view = self._view
        if view.rules == SECOND or view.parameters.cache_policy == "paper":
            return view.gives_up(worker)
        return view.gives_up(worker) and view.pressure(worker) >= PRESSURE_MIN

    def _is_given_up(self, candidate: Candidate) -> bool:
        """Whether a worker of the degree could give it up."""
        tips, (node, degree, *_) = self._view.trie.tips, candidate
        if not self._all_give and not any(tips.is_end(worker, node.block) for worker in self._giving[degree]):
            return False
        return self._view.rules == SECOND or self.worker(candidate) is not None

    def take(self, candidate: Candidate, worker: Worker) -> int:
        gone = [each.block for each in islice(self._path(candidate.node, worker), COPY_BLOCKS_MAX)]
        self._going.update((block, worker.degree) for block in gone)
        return len(gone)

    def _path(self, node: Node, worker: Worker) -> Iterator[Node]:
        yield node
        trie, index = self._view.trie, INDEX[worker.degree]
        for each in islice(node.upwards(), 1, None):
            wanted = trie.demand(each).access[index] >= each.replicas[index] * trie.limits.reclaim
            needed = (each.block, worker.id) in self._needed or (each.block, worker.degree) in self._going
            if wanted or needed or trie.tips.forks(worker.id, each.block):
                break
            yield each


def coldest(trie: Trie, limit: int, is_given_up: Callable[[Candidate], bool], *, spare: bool) -> Coldest:
    """The first `limit` of the reclaimable pairs (z, C). Passed over in the line are only what was asked for so lately that it
    shows, and `KEPT_MAX` pairs that nobody gives up: a scan costs no more than that and `limit`."""
    found: list[Candidate] = []
    unasked = kept = passed = 0
    for at, node in enumerate(trie.tips.oldest(spare=spare), start=1):
        access_C = trie.demand(node).access
        for degree, ends, replicas, access in zip(DEGREES, node.ends, node.replicas, access_C, strict=True):
            if not ends or replicas <= spare or access >= replicas * trie.limits.reclaim:
                continue
            candidate = Candidate(node, degree, replicas, access / replicas)
            if is_given_up(candidate):
                found.append(candidate)
                unasked += not access
            else:
                kept += 1
        if unasked >= limit:
            break
        if kept >= KEPT_MAX:
            passed = at
            break
    return Coldest(nsmallest(limit, found, key=lambda each: each.score), passed)


def _needed_by(trie: Trie, copy: ReplicationRequested) -> Iterator[tuple[BlockId, WorkerId]]:
    """Where a copy's path ends at its sources, and begins at its destination. What is above goes only with that, as a holder of
    both a path and a branch of it has a fork between them."""
    z = BlockId(copy.z)
    yield from ((z, source) for source in copy.sources)
    for node in islice(_upwards(trie, copy.z), copy.blocks, copy.blocks + 1):
        yield node.block, copy.destination


def _upwards(trie: Trie, block: bytes) -> Iterable[Node]:
    node = trie.nodes.get(BlockId(block))
    return node.upwards() if node is not None else ()
