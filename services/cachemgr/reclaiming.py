"""Which replicas a scan gives up: Algorithm 2's third list (model, 2.4), as a path each. Pure.

    reclaim       a degree C has z, and access < r · θ_reclaim:  access / r, rising
    reclaimed     at the holder of degree C with the fullest cache that holds nothing below z
    with it       what is above z there, as far as it is as little wanted and holds up nothing else there

Of equals the one whose node was demanded, or became an end of what somebody holds, longest ago comes first; of workers that
are as full the one with the higher id. A pair (z, C) gives up one replica at a time, whether as an operation's z or on its
path: what is wanted of a prefix that two workers have may be one copy. What a copy reads from, and what it goes on from at its
destination, stays, and so does what an agent would not give up during the last `REST_SCANS` scans.

Under `regret` reclamation needs a full cache, a second copy and a cold minute.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import islice
from typing import Protocol

from services.cachemgr.node import INDEX, Candidate, Node
from services.cachemgr.reclamation import Excess
from services.cachemgr.replication import OPEN_MAX
from services.cachemgr.trie import Trie
from services.cachemgr.view import View
from shared.contracts.copy_commands import COPY_BLOCKS_MAX
from shared.contracts.events import ReplicationRequested
from shared.contracts.ids import BlockId, WorkerId
from shared.model.lattice import DEGREES
from shared.model.pool import Worker

LOOK_PER_OPERATION = 16
"""Cold pairs looked at for each reclamation that may be chosen."""

KEPT_MAX = 4_096
"""Cold pairs passed over for being only where nothing can be given up, as at a cordoned node: 6 ms, of a few workers."""

PRESSURE_MIN = 0.9
COLD_S = 60.0


class Rules(Protocol):
    """What may go. Of before there are others (`first_rules.py`)."""

    def candidates(self, limit: int, *, spare: bool) -> Iterable[Candidate]:
        """The first of those that are reclaimable; `spare`: that a degree has more than once."""

    def worker(self, candidate: Candidate) -> Worker | None:
        """The one that gives it up."""

    def take(self, candidate: Candidate, worker: Worker) -> int:
        """How many blocks go with it, itself included. They are going from now on."""


def reclamations(view: View, scan: int, rules: Rules) -> list[Excess]:
    """The replicas to give up; `scan` names them."""
    if view.parameters.cache_policy == "lru" or view.parameters.frozen:
        return []
    limit = max(0, min(view.parameters.cache_operations_max, OPEN_MAX - len(view.operations.reclaiming)))
    paper = view.parameters.cache_policy == "paper"
    quiet_scans = COLD_S / view.parameters.scan_every_s
    found: list[Excess] = []
    for candidate in rules.candidates(limit * LOOK_PER_OPERATION, spare=not paper):
        if not paper and view.trie.scan - candidate.node.stamp < quiet_scans:
            continue
        worker = rules.worker(candidate)
        if worker is not None and (paper or view.pressure(worker) >= PRESSURE_MIN):
            name, blocks = f"reclaim-{scan}-{len(found) + 1}", rules.take(candidate, worker)
            found.append(Excess(name, candidate.node.block, worker.id, blocks, candidate.score))
        if len(found) == limit:
            break
    return found


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
        self._giving = {
            degree: [each.id for each in workers if each.degree == degree and view.gives_up(each)] for degree in DEGREES
        }
        self._all_give = sum(map(len, self._giving.values())) == len(workers)

    def candidates(self, limit: int, *, spare: bool) -> Iterable[Candidate]:
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

    def _is_given_up(self, node: Node, degree: int) -> bool:
        """Whether any worker of the degree could give it up."""
        tips = self._view.trie.tips
        return self._all_give or any(tips.is_end(worker, node.block) for worker in self._giving[degree])

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


def coldest(trie: Trie, limit: int, is_given_up: Callable[[Node, int], bool], *, spare: bool) -> list[Candidate]:
    """The first `limit` of the reclaimable pairs (z, C), z an end at some worker of degree C. Passed over in the line are only
    what was asked for so lately that it shows, and `KEPT_MAX` pairs that nobody could give up: a scan costs no more than that
    and `limit`."""
    found, unasked, kept = [], 0, 0
    for node in trie.tips.oldest(spare=spare):
        access_C = trie.demand(node).access
        for degree, ends, replicas, access in zip(DEGREES, node.ends, node.replicas, access_C, strict=True):
            if not ends or replicas <= spare or access >= replicas * trie.limits.reclaim:
                continue
            if is_given_up(node, degree):
                found.append(Candidate(node, degree, replicas, access / replicas))
                unasked += not access
            else:
                kept += 1
        if unasked >= limit or kept >= KEPT_MAX:
            break
    return nsmallest(limit, found, key=lambda each: each.score)


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
