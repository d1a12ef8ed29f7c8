"""Which copies a scan asks for, out of Algorithm 2's candidates (paper, section 4.4) or by regret. Pure.

A node of this trie is one block, and a candidate's ancestors are mostly candidates too. So an operation is a path: the deepest
candidate z stands for those above it, its copy is what its destination lacks of the path root → z (the *footprint*), and at
most one operation for a path and degree is under way.

    inter     nobody at degree C has z:  missed seconds on the copied path / footprint, falling
    intra     C has too few copies:      access / copies, falling; within 10 % the smaller copy first

    destination   degree C, schedulable, without z, with room: the longest held part of the path, then the least load
    source        holders of z by load; for intra those of degree C, if any, first those below the 25th percentile of its loads

What is given up, `reclaiming.py` says. A source has the destination's engine: others' memory it could not read.

What has failed for a block at a worker is not asked for there during the next `REST_SCANS` scans, and what its engine cannot
do is not asked for at all.

Ties go to the lower id, so every process that folds the log chooses alike. Under `regret` the destination is the degree's
least loaded worker, a missing block weighing `MISSING_US`.
A copy that its destination would have to compute is not asked for unless more than its prefill was lost.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Literal

from services.cachemgr.node import Candidate
from services.cachemgr.replication import OPEN_MAX, Wish
from services.cachemgr.trie import Trie
from services.cachemgr.view import FIRST, PRESENT, Destination, Load, View
from shared.contracts.copy_commands import COPY_BLOCKS_MAX
from shared.contracts.ids import BlockId
from shared.model.cost import US_PER_S

Kind = Literal["inter", "intra"]

SOURCES_MAX = 3
QUIET_SHARE = 0.25
NEARLY = 0.9
"""Scores within 10 % count as equal."""

SEEN_MIN = 3.0
MISSING_US = 100_000
RELIEF = 0.5
"""What is left of a path's regret when a copy of it is asked for."""


def copies(view: View, scan: int) -> list[Wish]:
    """The copies of scan `scan`, which names them."""
    if view.parameters.frozen:
        return []
    room = max(0, OPEN_MAX - len(view.operations.open))
    limit = min(view.parameters.cache_operations_max, room)
    match view.parameters.cache_policy:
        case "lru":
            return []
        case "regret":
            found = _by_regret(view, limit)
        case "paper":
            inter, intra, _ = view.trie.candidates()
            found = [*_first_copies(view, inter, limit), *_more_copies(view, intra, limit)]
    return [wish._replace(operation=f"copy-{scan}-{number}") for number, wish in enumerate(found[:room], start=1)]


# --- Algorithm 2


def _first_copies(view: View, candidates: list[Candidate], limit: int) -> list[Wish]:
    missed_s = {(each.node.block, each.degree): each.score for each in candidates}

    def gain_s(candidate: Candidate) -> float:
        on_path = (missed_s.get((each.block, candidate.degree)) for each in candidate.node.upwards())
        return sum(each for each in on_path if each is not None)

    priced = [
        (gain_s(each) / place.blocks, each, place)
        for each in _deepest(view, candidates)
        if (place := _destination(view, each)) is not None
    ]
    priced.sort(key=lambda each: (-each[0], each[1].node.block, each[1].degree))
    wishes = (_wish_with_room(view, each, "inter", place, score) for score, each, place in priced)
    return list(islice(filter(None, wishes), limit))


def _more_copies(view: View, candidates: list[Candidate], limit: int) -> list[Wish]:
    placed = [(each, place) for each in _deepest(view, candidates) if (place := _destination(view, each)) is not None]
    placed.sort(key=lambda each: (-each[0].score, each[0].node.block, each[0].degree))
    ranked: list[tuple[Candidate, Destination]] = []
    while placed:
        best = placed[0][0].score
        near = [each for each in placed if each[0].score >= NEARLY * best]
        ranked += sorted(near, key=lambda each: each[1].blocks)
        placed = placed[len(near) :]
    wishes = (_wish_with_room(view, each, "intra", place, each.score) for each, place in ranked)
    return list(islice(filter(None, wishes), limit))


# --- by regret


def _by_regret(view: View, limit: int) -> list[Wish]:
    """One path of each root and degree, those that lost most first: the deepest that can be copied and is worth it."""
    candidates = view.trie.regretted(SEEN_MIN)
    lost_s: dict[tuple[BlockId, int], float] = {}
    paths: dict[tuple[BlockId, int], list[Candidate]] = {}
    for each in sorted(_deepest(view, candidates), key=lambda each: (each.node.depth, each.node.block)):
        *_, root = each.node.upwards()
        lost_s[root.block, each.degree] = lost_s.get((root.block, each.degree), 0.0) + each.score
        paths.setdefault((root.block, each.degree), []).append(each)
    missed_s = {(each.node.block, each.degree): each.score for each in candidates}
    groups = sorted(paths, key=lambda group: (-lost_s[group], group))
    if view.rules < PRESENT:
        groups = groups[:limit]
        paths = {group: paths[group][-1:] for group in groups}
    wishes = (_deepest_wish(view, paths[group][::-1], missed_s, lost_s[group]) for group in groups)
    return list(islice(filter(None, wishes), limit))


def _deepest_wish(
    view: View, candidates: list[Candidate], missed_s: Mapping[tuple[BlockId, int], float], score: float
) -> Wish | None:
    for each in candidates:
        place = _destination(view, each, MISSING_US)
        on_path_s = sum(missed_s.get((node.block, each.degree), 0.0) for node in each.node.upwards())
        if place is not None and view.copy_us(place, each.node.depth + 1) < on_path_s * US_PER_S:
            kind: Kind = "intra" if each.replicas else "inter"
            return _wish_with_room(view, each, kind, place, score, MISSING_US)
    return None


# --- where to and from where


def _deepest(view: View, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those below which there is no other of the same degree, and of whose path no copy to the degree is under way."""
    candidates = list(candidates)
    above = _above(candidates)
    coming: set[tuple[bytes, int]] = set()
    covered: set[tuple[BlockId, int]] = set()
    for operation in view.operations.open.values():
        asked = operation.asked
        coming.add((asked.z, asked.degree))
        if (node := view.trie.nodes.get(BlockId(asked.z))) is not None:
            covered.update((each.block, asked.degree) for each in node.upwards())
    for each in candidates:
        if (each.node.block, each.degree) in above or (each.node.block, each.degree) in covered:
            continue
        if not any((node.block, each.degree) in coming for node in each.node.upwards()):
            yield each


def _above(candidates: Iterable[Candidate]) -> set[tuple[BlockId, int]]:
    """What lies above a candidate, by degree, with or without others between: each path is walked once."""
    above: set[tuple[BlockId, int]] = set()
    for each in candidates:
        for node in islice(each.node.upwards(), 1, None):
            if (node.block, each.degree) in above:
                break
            above.add((node.block, each.degree))
    return above


def _destination(view: View, candidate: Candidate, missing_us: int | None = None) -> Destination | None:
    """`missing_us` is what a missing block weighs against what waits there; None lets the blocks decide first."""
    if not (workers := view.of_degree(candidate.degree)):
        return None
    path = candidate.node.path
    matched = view.holders.matched(path)
    engines = set(map(view.engine, view.holders.index.holders(candidate.node.block)))
    found = []
    for worker in workers:
        if (candidate.node.block, worker.id) in view.operations.resting:
            continue
        if view.rules != FIRST and view.engine(worker.id) not in engines:
            continue
        missing = len(path) - matched.get(worker.id, 0)
        if 0 < missing <= min(view.room(worker), COPY_BLOCKS_MAX):
            load = view.load(worker.id)
            rank = missing if missing_us is None else missing_us * missing + load.service_us
            found.append(Destination(rank, load, worker, missing))
    return min(found, key=lambda each: (each.rank, each.load), default=None)


def _wish_with_room(
    view: View, candidate: Candidate, kind: Kind, place: Destination, score: float, missing_us: int | None = None
) -> Wish | None:
    """To `place`, or elsewhere if the room there has gone to what this scan has chosen before; None if there is no other."""
    found = place if place.blocks <= view.room(place.worker) else _destination(view, candidate, missing_us)
    if found is None:
        return None
    view.promised[found.worker.id] += found.blocks
    return _wish(view, candidate, kind, found, score)


def _wish(view: View, candidate: Candidate, kind: Kind, place: Destination, score: float) -> Wish:
    holding = view.can_lend(candidate.node.block, place.worker)
    sources: list[Load] = []
    if kind == "intra":
        loads = sorted(view.load(each.id) for each in view.of_degree(candidate.degree))
        quiet = loads[int(QUIET_SHARE * len(loads))].service_us if loads else 0
        peers = [each for each in loads if each.worker in holding]
        sources = sorted(peers, key=lambda each: (each.service_us >= quiet, each))
    if kind == "inter" or (not sources and view.rules != FIRST):
        # Degree C may have its copies where the destination cannot read them, or where nothing may be asked.
        sources = sorted(view.load(worker) for worker in holding)
    return Wish(
        operation="",
        z=candidate.node.block,
        degree=candidate.degree,
        kind=kind,
        sources=tuple(each.worker for each in sources[:SOURCES_MAX]),
        destination=place.worker.id,
        score=score,
    )


def relieved(trie: Trie, z: BlockId, degree: int) -> None:
    """A copy of the path of z to degree C was asked for because of regret."""
    if (node := trie.nodes.get(z)) is not None:
        for each in node.upwards():
            trie.relieved(each, degree, RELIEF)
