"""The folded state as bytes, and back: what a restarted manager goes on from (`keeper.py`).

Nodes and runs are millions, so they are columns: 16 bytes for a block's id, once, and numbers that compress to little; a node
is named by its place among the nodes. All else is frozen as any state is (`shared/runtime/states.py`). Orders are kept, as the
fold depends on them: which end is the coldest, which node without holders is forgotten first. So are statistics to their last
bit, as decisions compare them. What follows from the columns is not written: depths, children, ends.

This is the other half of `Trie`, `Tips` and `PrefixIndex`, and knows what they have inside.
"""

import gc
import struct
import sys
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from services.cachemgr.decider import State
from services.cachemgr.node import INDEX, Node, Replicas, Statistics, with_more
from services.cachemgr.tips import Tips
from services.cachemgr.trie import Trie
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, RequestId, WorkerId, unpack_block_ids
from shared.model.cost import Coefficients
from shared.model.lattice import DEGREES
from shared.model.prefix_index import PrefixIndex, Run
from shared.runtime.projection import Reached
from shared.runtime.states import BadState, freeze, thaw

PACKAGES = ("shared", "services")
"""Where the classes of a state are."""

ROOT, BELOW_THE_LAST, ELSEWHERE = range(3)
"""Where a node's parent is: it has none, it is the node before it, it is named."""

_LENGTH = struct.Struct("<Q")
_LINES = ("_hot", "_holderless", "_recent")


class Folded(NamedTuple):
    """A state, how far it is folded, and the cost model that it began with."""

    state: State
    reached: Reached
    began_with: Coefficients


class _Rest(NamedTuple):
    """All but the columns. `folded.state` has a trie and holders without nodes, runs and chains."""

    folded: Folded
    chains: dict[RequestId, bytes]
    replicas: list[Replicas]
    workers: list[WorkerId]


def pieces(folded: Folded) -> Iterator[bytes]:
    """The bytes, which are the same for equal states. AssertionError if holders and trie do not agree about a path."""
    state = folded.state
    index, trie = state.holders.index, state.trie
    palette: dict[Replicas, int] = {}
    replicas = array("I", (palette.setdefault(each.replicas, len(palette)) for each in trie.nodes.values()))
    rest = _Rest(
        folded._replace(state=_without_columns(state)),
        {request: b"".join(blocks) for request, blocks in state.holders.chains.items()},
        list(palette),
        list(index._runs),
    )
    yield from _framed(zlib.compress(freeze(rest), 1))
    yield from _framed(_numbers(replicas))
    numbers = _numbers_of_named(trie, index)
    for column in chain(_nodes(trie, numbers), _runs(index, trie, numbers)):
        yield from _framed(column)


def read(raw: bytes) -> Folded:
    """A new copy of what was written. Errors: BadState."""
    columns = _Columns(raw)
    # Millions of objects come, and none goes: to look for garbage among them would take longer than to make them.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _read(columns)
    except (LookupError, TypeError, AttributeError, ValueError, struct.error, zlib.error) as error:
        raise error if isinstance(error, BadState) else BadState(f"no state of a cache manager: {error}") from error
    finally:
        if was_on:
            gc.enable()


def _read(columns: "_Columns") -> Folded:
    rest = thaw(zlib.decompress(columns.next()), PACKAGES)
    if not isinstance(rest, _Rest):
        raise BadState("it is not what a cache manager has folded")
    state = rest.folded.state
    nodes = _read_nodes(columns, state.trie, rest.replicas)
    _read_runs(columns, state.holders.index, nodes, rest.workers)
    _count_ends(state.trie, state.holders.index)
    state.holders.chains = {request: tuple(unpack_block_ids(each)) for request, each in rest.chains.items()}
    state.holders.watcher = state.trie
    return rest.folded


def _without_columns(state: State) -> State:
    trie = copy(state.trie)
    index: PrefixIndex[WorkerId] = PrefixIndex()
    trie.nodes, trie.tips = {}, Tips()
    for line in _LINES:
        setattr(trie, line, type(getattr(trie, line))())
    index.counts = state.holders.index.counts
    return replace(state, trie=trie, holders=replace(state.holders, index=index, chains={}, watcher=None))


# --- nodes


def _numbers_of_named(trie: Trie, index: PrefixIndex[WorkerId]) -> dict[BlockId, int]:
    """The places of the nodes that the columns name. Where paths are long they are few."""
    named = {node.parent.block for last, node in _pairs(trie.nodes.values()) if node.parent not in (None, last)}
    named.update(chain.from_iterable(_lines(trie)))
    named.update(run.blocks[-1] for run in set(index.index.values()))
    return {block: number for number, block in enumerate(trie.nodes) if block in named}


def _pairs(nodes: Iterable[Node]) -> Iterator[tuple[Node | None, Node]]:
    """Each node after the one before it."""
    last: Node | None = None
    for node in nodes:
        yield last, node
        last = node


def _lines(trie: Trie) -> list[Mapping[BlockId, Node]]:
    return [*(getattr(trie, line) for line in _LINES), trie.tips._all, trie.tips._spare]


def _nodes(trie: Trie, numbers: Mapping[BlockId, int]) -> Iterator[bytes]:
    nodes = trie.nodes.values()
    yield b"".join(trie.nodes)
    where, named = bytearray(), array("I")
    for last, node in _pairs(nodes):
        if node.parent is None:
            where.append(ROOT)
        elif node.parent is last:
            where.append(BELOW_THE_LAST)
        else:
            where.append(ELSEWHERE)
            named.append(numbers[node.parent.block])
    yield zlib.compress(where, 1)
    yield _numbers(named)
    yield _numbers(array("Q", (each.born for each in nodes)))
    asked = [(number, each.statistics) for number, each in enumerate(nodes) if each.statistics is not None]
    yield _numbers(array("I", (number for number, _ in asked)))
    yield _numbers(array("Q", (each.stamp for _, each in asked)))
    yield _numbers(array("d", (each.seen for _, each in asked)))
    for at in range(len(DEGREES)):
        yield _numbers(array("d", (each.access[at] for _, each in asked)))
        yield _numbers(array("d", (each.missed[at] for _, each in asked)))
    for line in _lines(trie):
        yield _numbers(array("I", map(numbers.__getitem__, line)))


def _read_nodes(columns: "_Columns", trie: Trie, palette: list[Replicas]) -> list[Node]:
    replicas = columns.numbers("I")
    blocks, where, named = columns.blocks(), zlib.decompress(columns.next()), iter(columns.numbers("I"))
    nodes: list[Node] = []
    last: Node | None = None
    for block, at, born, holding in zip(blocks, where, columns.numbers("Q"), replicas, strict=True):
        above = None if at == ROOT else last if at == BELOW_THE_LAST else nodes[next(named)]
        node = Node(block, above, above.depth + 1 if above else 0, born, replicas=palette[holding])
        if above is not None:
            above.children += 1
        nodes.append(node)
        last = node
    trie.nodes = {node.block: node for node in nodes}
    asked, stamps, seen = columns.numbers("I"), columns.numbers("Q"), columns.numbers("d")
    by_degree = zip(*(columns.numbers("d") for _ in range(2 * len(DEGREES))), strict=True)
    for number, stamp, times, values in zip(asked, stamps, seen, by_degree, strict=True):
        nodes[number].statistics = Statistics(stamp, list(values[::2]), list(values[1::2]), times)

    def line() -> Iterator[tuple[BlockId, Node]]:
        return ((nodes[number].block, nodes[number]) for number in columns.numbers("I"))

    for name in _LINES:
        setattr(trie, name, type(getattr(trie, name))(line()))
    trie.tips = Tips()
    trie.tips._all, trie.tips._spare = OrderedDict(line()), OrderedDict(line())
    return nodes


# --- runs


def _runs(index: PrefixIndex[WorkerId], trie: Trie, numbers: Mapping[BlockId, int]) -> Iterator[bytes]:
    """Every run after the one above it. A run is the path down to its last block, so that names it."""
    runs = [index._root]
    for run in runs:
        runs.extend(run.children.values())
    below = runs[1:]
    for run in below:
        assert run.blocks == _path(trie.nodes[run.blocks[-1]], len(run.blocks)), "a run is no path of the trie"
    number_of = {id(run): number for number, run in enumerate(runs)}
    workers = {worker: number for number, worker in enumerate(index._runs)}
    yield _numbers(array("I", (len(run.children) for run in runs)))
    yield _numbers(array("I", (numbers[run.blocks[-1]] for run in below)))
    yield _numbers(array("I", (len(run.blocks) for run in below)))
    yield _numbers(array("I", (len(run.ends) for run in below)))
    yield _numbers(array("I", (workers[worker] for run in below for worker in run.ends)))
    yield _numbers(array("I", (end for run in below for end in run.ends.values())))
    yield _numbers(array("I", map(len, index._runs.values())))
    yield _numbers(array("I", (number_of[id(run)] for held in index._runs.values() for run in held)))


def _read_runs(
    columns: "_Columns", index: PrefixIndex[WorkerId], nodes: Sequence[Node], workers: list[WorkerId]
) -> None:
    children, lasts = columns.numbers("I"), iter(columns.numbers("I"))
    lengths, holders = iter(columns.numbers("I")), iter(columns.numbers("I"))
    ends = zip(columns.numbers("I"), columns.numbers("I"), strict=True)
    runs = [index._root]
    for number, wanted in enumerate(children):
        above = runs[number]
        for _ in range(wanted):
            blocks = _path(nodes[next(lasts)], next(lengths))
            run: Run[WorkerId] = Run(above.blocks[-1] if above.blocks else None, above.end, blocks)
            run.ends = {workers[worker]: end for worker, end in islice(ends, next(holders))}
            above.children[blocks[0]] = run
            index.index.update(dict.fromkeys(blocks, run))
            runs.append(run)
    counts, held = columns.numbers("I"), iter(columns.numbers("I"))
    index._runs = {
        worker: dict.fromkeys(runs[each] for each in islice(held, count))
        for worker, count in zip(workers, counts, strict=True)
    }


def _count_ends(trie: Trie, index: PrefixIndex[WorkerId]) -> None:
    """Each worker's ends and forks: of a run only its last block there can be one."""
    for worker, runs in index._runs.items():
        below = trie.tips.below[worker] = {}
        for run in runs:
            end = run.ends[worker]
            children = 0 if end < run.end else sum(worker in each.ends for each in run.children.values())
            if children != 1:
                below[run.blocks[end - run.first - 1]] = children
        for node in (trie.nodes[block] for block, children in below.items() if not children):
            node.ends = with_more(node.ends, INDEX[trie.degrees[worker]], 1)


def _path(last: Node, length: int) -> list[BlockId]:
    """The last `length` blocks of the path that ends with `last`."""
    return [each.block for each in islice(last.upwards(), length)][::-1]


# --- columns


class _Columns:
    """Those of some bytes, one after the other."""

    def __init__(self, raw: bytes) -> None:
        self._raw = memoryview(raw)
        self._at = 0

    def next(self) -> memoryview:
        begin = self._at + _LENGTH.size
        (length,) = _LENGTH.unpack(self._raw[self._at : begin])
        self._at = begin + length
        if self._at > len(self._raw):
            raise BadState("it ends in the middle")
        return self._raw[begin : self._at]

    def numbers(self, code: str) -> "array[Any]":
        found: array[Any] = array(code)
        found.frombytes(zlib.decompress(self.next()))
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def blocks(self) -> Iterator[BlockId]:
        column = self.next()
        return (BlockId(bytes(column[at : at + BLOCK_ID_BYTES])) for at in range(0, len(column), BLOCK_ID_BYTES))


def _framed(column: bytes) -> Iterable[bytes]:
    return _LENGTH.pack(len(column)), column


def _numbers(column: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return zlib.compress(column, 1)
