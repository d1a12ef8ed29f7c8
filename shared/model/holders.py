"""Which worker holds which block, as far as its events can be believed.

A worker's own index is the authority; this is its projection, kept as a tree of runs (`prefix_index.py`), out of which one
call gives the longest match of a prompt at every worker. Each worker's cache events are numbered without gaps per incarnation:
after a gap nothing that was known before it is credited (`degraded`), an incarnation that was not registered gets no credit at
all (`blind`), until a full report is folded. Nor does a worker whose beginning the log has dropped (`Stored.kept`). What a
blind worker says it has stored is not even kept, as the report will say it again. What a split has assigned to a worker that
cannot use it yet is apart (`pending.py`).
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
    BlockRun,
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    EpochAborted,
    EpochCommitted,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    PlacementReconciled,
    PrefillCompleted,
    RequestReceived,
    RouterLost,
    Trust,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, Source, WorkerId, node_of, unpack_block_ids
from shared.model.lost_routers import LostRouters
from shared.model.pending import Pending, parents_of
from shared.model.prefix_index import PrefixIndex

ENDED_CHAINS_MAX = 10_000
"""Chains of ended requests that are kept, because an agent's `blocks-stored` may be folded after the request's end."""

ENDED_BLOCKS_MAX = 1_000_000
"""Blocks of those chains together, some 60 MB: ten thousand prompts of a million tokens would be several gigabytes."""

Chain = tuple[BlockId, ...]

HEARD = frozenset(
    {
        RequestReceived, *ENDS, RouterLost, PrefillCompleted, BlocksStored, BlocksEvicted, CacheReported, NodeRegistered,
        NodeLost, NodeDeclaredLost, PlacementReconciled, EpochCommitted, EpochAborted,
    }
)  # fmt: skip
"""All others say nothing about blocks. To find that none of many cases fits takes longer than most of them do."""


class Watcher(Protocol):
    """Told of each change as it is folded, so that an index on top of `Holders` need not look for differences."""

    def held(self, worker: WorkerId, parent: BlockId | None, blocks: Sequence[BlockId]) -> None:
        """The worker did not hold the blocks, each the parent of the next, and does now; `parent` was told before."""

    def dropped(self, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
        """The worker no longer holds the blocks. Children are told before their parents."""


@dataclass(slots=True)
class Held:
    """How far to believe what is known of one worker."""

    incarnation: int
    trust: Trust = "exact"
    number: int = 0
    report: list[BlockRun] = field(default_factory=list)
    report_parts: int = 0


@dataclass(slots=True)
class Holders:
    """State of the fold; `evolve` is its only writer. `ended` holds the blocks of each kept chain, `ended_blocks` their sum.
    `drifted_blocks` counts those about which reports have shown an exact belief to be wrong."""

    workers: dict[WorkerId, Held] = field(default_factory=dict)
    index: PrefixIndex[WorkerId] = field(default_factory=PrefixIndex)
    chains: dict[RequestId, Chain] = field(default_factory=dict)
    open: dict[RequestId, Source] = field(default_factory=dict)
    ended: OrderedDict[RequestId, int] = field(default_factory=OrderedDict)
    ended_blocks: int = 0
    incarnations: dict[NodeId, int] = field(default_factory=dict)
    reconciled: dict[tuple[NodeId, int], PlacementReconciled] = field(default_factory=dict)
    drifted_blocks: int = 0
    pending: Pending = field(default_factory=Pending)
    lost_routers: LostRouters = field(default_factory=LostRouters)
    watcher: Watcher | None = None

    def matched(self, chain: Sequence[BlockId]) -> dict[WorkerId, int]:
        """How many leading blocks of `chain` each worker is known to hold, for those that hold any: a few microseconds."""
        return self.index.matched(chain)

    def trust(self, worker: WorkerId) -> Trust:
        """`blind` for a worker nothing is known of."""
        held = self.workers.get(worker)
        return held.trust if held else "blind"

    def check(self) -> None:
        """The index is sound, and says nothing of workers that are blind or do not exist."""
        self.index.check()
        credited = {worker for worker, held in self.workers.items() if held.trust != "blind"}
        assert self.index.counts.keys() <= credited, "a worker of which nothing is known holds blocks"
        assert self.pending.of_worker.keys() <= self.workers.keys(), (
            "blocks are pending at a worker that does not exist"
        )
        assert self.ended_blocks == sum(self.ended.values()), "the blocks of ended requests are miscounted"


def in_doubt(holders: Holders, alive: Collection[NodeId]) -> dict[NodeId, tuple[WorkerId, ...]]:
    """The workers of these nodes whose cache is not known exactly, by node: a full report mends that."""
    doubtful: dict[NodeId, tuple[WorkerId, ...]] = {}
    for worker, held in holders.workers.items():
        node = node_of(worker)
        if held.trust != "exact" and node in alive:
            doubtful[node] = (*doubtful.get(node, ()), worker)
    return doubtful


def evolve(holders: Holders, stored: Stored) -> None:
    """Fold one event. Events that say nothing about blocks leave the state as it is."""
    if type(stored.data) not in HEARD:
        return
    match stored.data:
        case RequestReceived() as received:
            # A chain that goes on from known blocks is of another version: what is stored of it cannot be credited.
            if not received.known_blocks:
                holders.chains[received.request] = tuple(unpack_block_ids(received.block_ids))
            if stored.event.source in holders.lost_routers:
                end(holders, received.request)
            else:
                holders.open[received.request] = stored.event.source
        case PrefillCompleted() as data:
            holders.pending.passed(data.worker, holders.chains.get(data.request, ()))
        case BlocksStored() as data:
            if held := _in_order(holders, data.worker, data.incarnation, data.number):
                _store(holders, data, held)
        case BlocksEvicted() as data:
            if held := _in_order(holders, data.worker, data.incarnation, data.number):
                _dropped(holders, data.worker, holders.index.remove(data.worker, unpack_block_ids(data.block_ids)))
        case ended if isinstance(ended, ENDS):
            end(holders, ended.request)
        case RouterLost() as lost:
            holders.lost_routers.add(lost.source)
            for request in [each for each, source in holders.open.items() if source == lost.source]:
                end(holders, request)
        case CacheReported() as data:
            _report(holders, data)
        case NodeRegistered() as data:
            holders.incarnations[data.node] = data.incarnation
            for worker in [each for each in holders.workers if node_of(each) == data.node]:
                _forget(holders, worker)
                holders.workers[worker] = Held(data.incarnation, _at_first(stored))
        case NodeLost() | NodeDeclaredLost() as data if data.incarnation >= holders.incarnations.get(data.node, 0):
            for worker in [each for each in holders.workers if node_of(each) == data.node]:
                _clear(holders, worker)
                holders.pending.forget(worker)
        case PlacementReconciled() as data:
            holders.reconciled[data.node, data.epoch] = data
        case EpochCommitted() as data:
            _commit(holders, data, _at_first(stored))
        case EpochAborted() as data:
            holders.reconciled.pop((data.node, data.epoch), None)
        case _:
            pass


def end(holders: Holders, request: RequestId) -> None:
    """The request is open no longer; its chain is kept until newer ones need the room."""
    holders.open.pop(request, None)
    blocks = len(holders.chains.get(request, ()))
    holders.ended_blocks += blocks - holders.ended.get(request, 0)
    holders.ended[request] = blocks
    while len(holders.ended) > ENDED_CHAINS_MAX or holders.ended_blocks > ENDED_BLOCKS_MAX:
        oldest, blocks = holders.ended.popitem(last=False)
        holders.ended_blocks -= blocks
        holders.chains.pop(oldest, None)


def _in_order(holders: Holders, worker: WorkerId, incarnation: int, number: int) -> Held | None:
    """The worker's state, its trust lowered if this event does not follow the last one; None if it is to be ignored."""
    held = holders.workers.get(worker)
    if held is None or incarnation < held.incarnation:
        return None
    if incarnation > held.incarnation:
        _clear(holders, worker)
        held.incarnation, held.trust = incarnation, "blind"
    elif number != held.number + 1:
        _clear(holders, worker)
        held.trust = "degraded" if held.trust != "blind" else "blind"
    held.number = number
    return held


def _store(holders: Holders, data: BlocksStored, held: Held) -> None:
    if data.cause != "prefill":
        _add_runs(holders, data.worker, held, data.runs)
        return
    chain = holders.chains.get(data.request) if data.request else None
    if chain is None or len(chain) < data.first_depth + data.blocks:
        _clear(holders, data.worker)
        held.trust = "degraded" if held.trust != "blind" else "blind"
        return
    parent = chain[data.first_depth - 1] if data.first_depth else None
    _add(holders, data.worker, held, parent, chain[data.first_depth : data.first_depth + data.blocks])


def _report(holders: Holders, data: CacheReported) -> None:
    held = holders.workers.get(data.worker)
    if held is None or data.incarnation < held.incarnation:
        return
    if data.part == 1:
        held.report, held.report_parts = [], 0
    if data.part != held.report_parts + 1:
        return  # its beginning was dropped from the log, or another report's was
    held.report_parts = data.part
    held.report.extend(data.runs)
    if data.part == data.parts:
        believed = held.trust == "exact" and (data.incarnation, data.number) == (held.incarnation, held.number)
        drift = _drift(holders, data.worker, held) if believed and held.number else 0
        holders.drifted_blocks += drift
        if drift or not believed or not held.number:
            _clear(holders, data.worker)
        held.incarnation, held.number, held.trust = data.incarnation, data.number, "exact"
        _add_runs(holders, data.worker, held, held.report)
        held.report, held.report_parts = [], 0


def _drift(holders: Holders, worker: WorkerId, held: Held) -> int:
    """How many blocks a worker's events and its report disagree about. A worker without events has just begun, and says for the
    first time what it has."""
    return len(dict(holders.index.held(worker)).keys() ^ parents_of(held.report).keys())


def _at_first(stored: Stored) -> Trust:
    """How a worker's cache is known when it begins: it is empty, or what came into it since has been dropped."""
    return "blind" if stored.kept else "exact"


def _commit(holders: Holders, data: EpochCommitted, trust: Trust) -> None:
    for worker in [each for each in holders.workers if node_of(each) == data.node]:
        _forget(holders, worker)
    incarnation = holders.incarnations.get(data.node, 0)
    for each in data.workers:
        holders.workers[each.worker] = Held(incarnation, trust)
    reconciled = holders.reconciled.pop((data.node, data.epoch), None)
    for child in reconciled.workers if reconciled else ():
        if held := holders.workers.get(child.worker):
            _add_runs(holders, child.worker, held, child.retained)
            holders.pending.begin(child.worker, child.pending)


def _add_runs(holders: Holders, worker: WorkerId, held: Held, runs: Iterable[BlockRun]) -> None:
    for run in runs:
        parent = BlockId(run.parent) if run.parent is not None else None
        _add(holders, worker, held, parent, unpack_block_ids(run.block_ids))


def _add(holders: Holders, worker: WorkerId, held: Held, parent: BlockId | None, blocks: Sequence[BlockId]) -> None:
    if held.trust == "blind":
        return
    new = holders.index.add(worker, parent, blocks)
    if new and holders.watcher is not None:
        above = parent if new[0] == blocks[0] else blocks[blocks.index(new[0]) - 1]
        holders.watcher.held(worker, above, new)


def _clear(holders: Holders, worker: WorkerId) -> None:
    _dropped(holders, worker, holders.index.clear(worker))


def _forget(holders: Holders, worker: WorkerId) -> None:
    del holders.workers[worker]
    _clear(holders, worker)
    holders.pending.forget(worker)


def _dropped(holders: Holders, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
    if blocks and holders.watcher is not None:
        holders.watcher.dropped(worker, blocks)
