"""Prefixes that are on their way: the chains of requests that a worker has queued or runs, found by a newcomer's chain.

A radix tree over all of them. A node is a run of blocks that every request below it shares; it knows those requests by
worker. A newcomer walks its chain once and learns, for each worker, how many leading blocks are coming there. Block ids are
hashes of everything before them, so two runs are compared by bisection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.ids import BlockId, RequestId, WorkerId
from shared.model.holders import Chain


class Coming(NamedTuple):
    """`blocks` leading blocks of a chain are coming to a worker, by any of `providers`."""

    blocks: int
    providers: Mapping[RequestId, None]


@dataclass(slots=True)
class _Run:
    """`of` are the requests whose chains have all of `blocks`, which is none of them only at the root; `count` is how many."""

    blocks: Chain
    children: dict[BlockId, "_Run"] = field(default_factory=dict)
    of: dict[WorkerId, dict[RequestId, None]] = field(default_factory=dict)
    count: int = 0


class InFlight:
    """`add` and `remove` are its only writers. Equal if the same requests are on their way, in whatever order they came."""

    __slots__ = ("_requests", "_root")

    def __init__(self) -> None:
        self._root = _Run(())
        self._requests: dict[RequestId, tuple[WorkerId, Chain]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InFlight) and self._requests == other._requests

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, _: object) -> "InFlight":
        """Request by request, because a path may have more runs than the interpreter's stack has room for."""
        copy = InFlight()
        for request, (worker, chain) in self._requests.items():
            copy.add(request, worker, chain)
        return copy

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: RequestId, worker: WorkerId, chain: Chain) -> None:
        """Its blocks are coming to the worker. A request is on its way to one worker at a time."""
        assert request not in self._requests, f"{request} is on its way twice"
        if not chain:
            return
        self._requests[request] = worker, chain
        run, depth = self._root, 0
        while depth < len(chain):
            child = run.children.get(chain[depth])
            if child is None:
                child = run.children[chain[depth]] = _Run(chain[depth:])
            elif (common := _common(child.blocks, chain, depth)) < len(child.blocks):
                child = _split(run, child, common)
            depth += len(child.blocks)
            child.of.setdefault(worker, {})[request] = None
            child.count += 1
            run = child

    def remove(self, request: RequestId) -> None:
        """It has ended there, whichever way. Not known is fine: a prompt of less than a block is never added."""
        worker, chain = self._requests.pop(request, (None, ()))
        if worker is None:
            return
        path, depth = [self._root], 0
        while depth < len(chain):
            run = path[-1].children[chain[depth]]
            path.append(run)
            depth += len(run.blocks)
            run.count -= 1
            del run.of[worker][request]
            if not run.of[worker]:
                del run.of[worker]
        for above, run in zip(path[-2::-1], path[:0:-1], strict=True):
            if not run.count:
                del above.children[run.blocks[0]]
            else:
                _join(run)

    def matches(self, chain: Sequence[BlockId]) -> dict[WorkerId, Coming]:
        """How much of `chain` is coming where."""
        found: dict[WorkerId, Coming] = {}
        run, depth = self._root, 0
        while depth < len(chain) and (child := run.children.get(chain[depth])) is not None:
            common = _common(child.blocks, chain, depth)
            depth += common
            for worker, providers in child.of.items():
                found[worker] = Coming(depth, providers)
            if common < len(child.blocks):
                break
            run = child
        return found

    def check(self) -> None:
        """The tree holds exactly the requests, each on the whole of its path, and no run that could be a part of another."""
        seen: dict[RequestId, tuple[WorkerId, Chain]] = {}
        stack: list[tuple[_Run, Chain]] = [(self._root, ())]
        while stack:
            run, before = stack.pop()
            path = before + run.blocks
            assert run is self._root or run.count == sum(map(len, run.of.values())) > 0, "a run is miscounted"
            for worker, requests in run.of.items():
                for request in requests:
                    assert seen.get(request, (worker, before)) == (worker, before), f"{request} is not on its own path"
                    seen[request] = worker, path
            for block, child in run.children.items():
                assert block == child.blocks[0], "a run is filed under another block"
                assert run is self._root or len(run.children) > 1 or child.count < run.count, "two runs should be one"
                stack.append((child, path))
        assert seen == self._requests, "the tree and the requests disagree"


def _common(run: Chain, chain: Sequence[BlockId], depth: int) -> int:
    """How many blocks of `run` are those of `chain` from `depth` on. At least the first is."""
    low, high = 1, min(len(run), len(chain) - depth)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == chain[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(above: _Run, run: _Run, blocks: int) -> _Run:
    """Cut a run after `blocks` blocks; returns the upper part."""
    upper = _Run(
        run.blocks[:blocks],
        {run.blocks[blocks]: run},
        {worker: dict(requests) for worker, requests in run.of.items()},
        run.count,
    )
    run.blocks = run.blocks[blocks:]
    above.children[upper.blocks[0]] = upper
    return upper


def _join(run: _Run) -> None:
    """Undo a split that no request needs any more: all that go through the run go on into its only child."""
    if len(run.children) == 1:
        [child] = run.children.values()
        if child.count == run.count:
            run.blocks, run.children, run.of = run.blocks + child.blocks, child.children, child.of
