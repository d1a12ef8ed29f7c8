"""Which holders have how much of a prompt's block chain: a radix tree whose edges are runs of blocks.

A block id names its whole prefix (`blocks.py`), so all prompts that contain a block agree on everything before it, and the
blocks that anybody holds are a forest. A *run* is a stretch of one path without a branch. What a holder has is
prefix-closed: of each run it has a leading part, and it has all of the runs above. So a run keeps one number per holder,
and one walk over the few runs of a prompt finds every holder's depth.

1.  A run is split where a path branches, and joined with its only child when the branch is gone.
2.  A run is as long as its longest holder's part; a run that nobody holds does not exist.
3.  `index` says in which run a block is. Its place in the run is looked for; where blocks come and go it is the end.
4.  A block that is known below another parent is not credited: whoever says so is mistaken about one of the two.

Costs: a match, O(runs of the path + holders met); a change, O(blocks told) and once per split or join O(blocks of the run).
Memory: a block once, about 140 bytes with its id; a holder of a run about 130 bytes, however long the run is.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.contracts.ids import BlockId

H = TypeVar("H", bound=str)
"""Whoever holds blocks. What requests are about to leave is another tree, in `services/router/in_flight.py`."""


@dataclass(slots=True, eq=False)
class Run(Generic[H]):
    """`blocks` follow the block `above`, which is the last of the run above; `first` blocks are before them. `ends` says how
    many blocks of the path each holder has, more than `first`. `children` are by their first block."""

    above: BlockId | None
    first: int
    blocks: list[BlockId]
    ends: dict[H, int] = field(default_factory=dict)
    children: "dict[BlockId, Run[H]]" = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The depth at which the run ends."""
        return self.first + len(self.blocks)

    def depth(self, block: BlockId, likely: int) -> int:
        """How many blocks of the path come before `block`, which is in the run; `likely` is looked at first."""
        if self.first <= likely < self.end and self.blocks[likely - self.first] == block:
            return likely
        return self.first + self.blocks.index(block)

    def agrees(self, depth: int, blocks: Sequence[BlockId], at: int) -> int:
        """With how many of `blocks` from the one at `at` on, which would be at `depth`."""
        own = self.blocks[depth - self.first : depth - self.first + len(blocks) - at]
        told = list(blocks[at : at + len(own)])
        if own == told:
            return len(own)
        return next(place for place, (one, other) in enumerate(zip(own, told, strict=True)) if one != other)


class PrefixIndex(Generic[H]):
    """The tree. `counts` holds how many blocks each holder has; one that has none is in no index."""

    __slots__ = ("_root", "_runs", "counts", "index")

    def __init__(self) -> None:
        self.index: dict[BlockId, Run[H]] = {}
        self.counts: dict[H, int] = {}
        self._root: Run[H] = Run(None, 0, [])
        self._runs: dict[H, dict[Run[H], None]] = {}

    # --- questions

    def matched(self, chain: Sequence[BlockId]) -> dict[H, int]:
        """How many leading blocks of `chain` each holder has; those that have none are left out."""
        depths: dict[H, int] = {}
        run = self._root.children.get(chain[0]) if chain else None
        if run is None:
            return depths
        length = len(chain)
        while (end := run.first + len(run.blocks)) < length and (below := run.children.get(chain[end])) is not None:
            depths.update(run.ends)
            run = below
        reached = self._parted(run, chain)
        if reached == end:
            depths.update(run.ends)
        elif min(run.ends.values()) >= reached:
            depths.update(dict.fromkeys(run.ends, reached))
        else:
            depths.update({holder: has if has < reached else reached for holder, has in run.ends.items()})
        return depths

    def holds(self, holder: H, block: BlockId) -> bool:
        """Whether the holder has the block."""
        run = self.index.get(block)
        return run is not None and holder in run.ends and run.depth(block, run.ends[holder] - 1) < run.ends[holder]

    def holders(self, block: BlockId) -> list[H]:
        """Who has the block."""
        if (run := self.index.get(block)) is None:
            return []
        depth = run.depth(block, run.first)
        return [holder for holder, end in run.ends.items() if end > depth]

    def held(self, holder: H) -> Iterator[tuple[BlockId, BlockId | None]]:
        """The holder's blocks with their parents, parents first."""
        for run in sorted(self._runs.get(holder, ()), key=lambda each: each.first):
            above = run.above
            for block in run.blocks[: run.ends[holder] - run.first]:
                yield block, above
                above = block

    # --- changes

    def add(self, holder: H, parent: BlockId | None, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        """The holder has `blocks`, each the parent of the next. Returns those that are new to it, the rest of `blocks` or a
        part of it; nothing below a parent that it does not have: a prefix with a hole is no prefix."""
        if parent is None:
            run, depth = self._root, 0
        elif (known := self.index.get(parent)) is not None and holder in known.ends:
            run, depth = known, known.depth(parent, known.ends[holder] - 1) + 1
            if depth > run.ends[holder]:
                return ()
        else:
            return ()
        at, since = 0, None
        while at < len(blocks):
            if depth == run.end:
                below = run.children.get(blocks[at]) or self._grow(run, blocks[at:])
                if below is None:
                    break
                run = below
            agreed = run.agrees(depth, blocks, at)
            if not agreed and blocks[at] in self.index:
                break
            if not agreed:
                self._split(run, depth)
                continue
            depth, at = depth + agreed, at + agreed
            if (had := run.ends.get(holder, run.first)) < depth:
                since = at - (depth - had) if since is None else since
                self._runs.setdefault(holder, {})[run] = None
                run.ends[holder] = depth
        if since is None:
            return ()
        self.counts[holder] = self.counts.get(holder, 0) + at - since
        return blocks[since:at]

    def remove(self, holder: H, blocks: Iterable[BlockId]) -> list[BlockId]:
        """The holder has `blocks` no longer, nor what it had below them. Returns what it has lost, children first."""
        lost: list[BlockId] = []
        shrunk: dict[Run[H], None] = {}
        for block in blocks:
            run = self.index.get(block)
            if run is None or (end := run.ends.get(holder)) is None:
                continue
            if (depth := run.depth(block, end - 1)) >= end:
                continue
            for below in self._below(holder, run) if end == run.end else ():
                lost += self._cut(holder, below, below.first)
                shrunk[below] = None
            lost += self._cut(holder, run, depth)
            shrunk[run] = None
        self._lost(holder, len(lost), shrunk)
        return lost

    def clear(self, holder: H) -> list[BlockId]:
        """The holder has nothing. Returns what it has lost, children first."""
        runs = dict.fromkeys(sorted(self._runs.get(holder, ()), key=lambda each: -each.first))
        lost: list[BlockId] = []
        for run in runs:
            lost += self._cut(holder, run, run.first)
        self._lost(holder, len(lost), runs)
        return lost

    # --- inside

    @staticmethod
    def _parted(run: Run[H], chain: Sequence[BlockId]) -> int:
        """The depth at which the run and a chain that shares its first block part, by bisection: ids chain."""
        last = min(len(chain), run.end)
        if chain[last - 1] == run.blocks[last - 1 - run.first]:
            return last
        depths = range(run.first + 1, last)
        agreed = bisect_left(depths, True, key=lambda depth: chain[depth] != run.blocks[depth - run.first])
        return run.first + 1 + agreed

    def _grow(self, run: Run[H], blocks: Sequence[BlockId]) -> Run[H] | None:
        """New blocks after the last of `run`, as more of it if nothing branches there. None if the first is known elsewhere."""
        fresh = dict.fromkeys(blocks)
        if len(fresh) < len(blocks) or not self.index.keys().isdisjoint(fresh):
            fresh.clear()
            for block in blocks:
                if block in self.index or block in fresh:
                    break
                fresh[block] = None
        if not fresh:
            return None
        if run is self._root or run.children:
            above = run.blocks[-1] if run.blocks else None
            run.children[blocks[0]] = run = Run(above, run.end, list(fresh))
        else:
            run.blocks += fresh
        self.index.update(dict.fromkeys(fresh, run))
        return run

    def _split(self, run: Run[H], depth: int) -> None:
        """End the run at `depth`; the rest is its child."""
        at = depth - run.first
        rest = Run(run.blocks[at - 1], depth, run.blocks[at:], children=run.children)
        del run.blocks[at:]
        run.children = {rest.blocks[0]: rest}
        self.index.update(dict.fromkeys(rest.blocks, rest))
        for holder, end in run.ends.items():
            if end > depth:
                rest.ends[holder], run.ends[holder] = end, depth
                self._runs[holder][rest] = None

    def _below(self, holder: H, run: Run[H]) -> list[Run[H]]:
        """The holder's runs under `run`, children first."""
        found = [child for child in run.children.values() if holder in child.ends]
        for each in found:
            found.extend(child for child in each.children.values() if holder in child.ends)
        return found[::-1]

    def _cut(self, holder: H, run: Run[H], depth: int) -> list[BlockId]:
        """The holder's part of the run ends at `depth`; what it has lost, last first."""
        lost = run.blocks[depth - run.first : run.ends[holder] - run.first]
        if depth > run.first:
            run.ends[holder] = depth
        else:
            del run.ends[holder], self._runs[holder][run]
        return lost[::-1]

    def _lost(self, holder: H, blocks: int, runs: Iterable[Run[H]]) -> None:
        """Forget what nobody has any longer of these runs, and count."""
        if not blocks:
            return
        self.counts[holder] -= blocks
        if not self.counts[holder]:
            del self.counts[holder], self._runs[holder]
        bare: dict[Run[H], None] = {}
        for run in sorted(runs, key=lambda each: -each.first):
            end = max(run.ends.values(), default=run.first)
            for block in run.blocks[end - run.first :]:
                del self.index[block]
            if end == run.first:
                above = self.index[run.above] if run.above is not None else self._root
                del above.children[run.blocks[0]]
                bare[above] = None
            del run.blocks[end - run.first :]
        bare.pop(self._root, None)
        for run in bare:
            if len(run.children) == 1:
                self._join(run)

    def _join(self, run: Run[H]) -> None:
        """Make one run of `run` and its only child."""
        (rest,) = run.children.values()
        run.blocks += rest.blocks
        run.children = rest.children
        run.ends.update(rest.ends)
        self.index.update(dict.fromkeys(rest.blocks, run))
        for holder in rest.ends:
            del self._runs[holder][rest]

    def __deepcopy__(self, _: object) -> "PrefixIndex[H]":
        """Run by run, because a path may have more runs than the interpreter's stack has room for."""
        copy: PrefixIndex[H] = PrefixIndex()
        runs = dict.fromkeys([self._root, *self.index.values()])
        twins = {run: Run(run.above, run.first, run.blocks.copy(), run.ends.copy()) for run in runs}
        for run, twin in twins.items():
            twin.children = {block: twins[child] for block, child in run.children.items()}
        copy._root = twins[self._root]
        copy.index = {block: twins[run] for block, run in self.index.items()}
        copy.counts = self.counts.copy()
        copy._runs = {holder: dict.fromkeys(twins[run] for run in held) for holder, held in self._runs.items()}
        return copy

    def check(self) -> None:
        """The tree is whole, every rule above holds, and the counts are right."""
        counts: dict[H, int] = {}
        runs: dict[H, set[Run[H]]] = {}
        blocks = 0
        found = [(self._root, run) for run in self._root.children.values()]
        for above, run in found:
            found.extend((run, child) for child in run.children.values())
            blocks += len(run.blocks)
            assert above.children[run.blocks[0]] is run, "a run is not where its first block says"
            assert run.first == above.end, "a run begins where no run ends"
            assert run.above == (above.blocks[-1] if above.blocks else None), "a run does not know its parent"
            assert all(self.index[block] is run for block in run.blocks), "a block is said to be in another run"
            assert max(run.ends.values()) == run.end, "blocks are kept that nobody has"
            assert len(run.children) != 1, "a run is split where nothing branches"
            for holder, end in run.ends.items():
                assert run.first < end <= run.end, f"{holder} has {end} blocks of {run.first}-{run.end}"
                assert above is self._root or above.ends.get(holder) == above.end, f"{holder} has a prefix with a hole"
                counts[holder] = counts.get(holder, 0) + end - run.first
                runs.setdefault(holder, set()).add(run)
        assert blocks == len(self.index), "a block that is in no run is indexed"
        assert counts == self.counts, "blocks are miscounted"
        assert runs == {holder: set(each) for holder, each in self._runs.items()}, "runs of a holder are missing"
