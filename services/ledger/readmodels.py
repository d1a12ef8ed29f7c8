"""The folds behind the read models, and which rows have changed since they were last written.

Nodes, holders and parameters are the folds that every service shares (`shared.model`), so the tables say what the services
believe. `tables.py` writes the changes; `loading.py` brings a state back out of the tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.ledger.patches import Patch, Place, Row, end, end_at_once, patches
from services.ledger.records import KEY_CHARS_MAX, Record
from services.ledger.runs import WorkerRuns, settle
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    ENDS,
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    Cordoned,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    Frozen,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    RankAdoptedEpoch,
    RequestReceived,
    RouterLost,
    Thawed,
    Uncordoned,
)
from shared.contracts.ids import BlockId, NodeId, Source, WorkerId, node_of
from shared.model import holders as holders_fold
from shared.model import parameters as parameters_fold
from shared.model import pool as pool_fold
from shared.model.holders import Holders
from shared.model.parameters import Parameters
from shared.model.pool import Pool

PATCHED_TABLES = {
    "requests": ("request",),
    "epochs": ("log", "node", "epoch"),
    "windows": ("log", "k"),
    "parameters": ("log", "stream_seq"),
    "replicas": ("operation",),
    "unfolded": ("log", "stream_seq"),
}
"""Tables whose rows are patched, with their keys."""

FAULTS = (ValueError, AssertionError, LookupError)
"""What a fold raises over an event that breaks a rule. The event is recorded, its fault is a row, the copy goes on."""

FAULT_CHARS_MAX = 500


@dataclass(slots=True)
class Changes:
    """What the tables do not say yet. `runs` holds run numbers per worker."""

    patches: dict[str, dict[tuple[Any, ...], Row]] = field(default_factory=dict)
    sources: set[Source] = field(default_factory=set)
    nodes: set[NodeId] = field(default_factory=set)
    caches: set[WorkerId] = field(default_factory=set)
    runs: dict[WorkerId, set[int]] = field(default_factory=dict)

    def add(self, patch: Patch) -> None:
        """Put a patch on top of those of the same row."""
        row = {name: value for name, value in patch.row.items() if value is not None}
        key = tuple(row[name] for name in PATCHED_TABLES[patch.table])
        self.patches.setdefault(patch.table, {}).setdefault(key, {}).update(row)


class BlockChanges:
    """What one event did to what workers hold; a watcher of `Holders`."""

    def __init__(self) -> None:
        self.gone: dict[WorkerId, set[BlockId]] = {}
        self.new: dict[WorkerId, dict[BlockId, BlockId | None]] = {}

    def held(self, worker: WorkerId, parent: BlockId | None, blocks: Sequence[BlockId]) -> None:
        self.new.setdefault(worker, {}).update(zip(blocks, [parent, *blocks], strict=False))

    def dropped(self, worker: WorkerId, blocks: Sequence[BlockId]) -> None:
        self.gone.setdefault(worker, set()).update(blocks)
        new = self.new.get(worker, {})
        for block in blocks:
            new.pop(block, None)


@dataclass(slots=True)
class ReadModels:
    """State of the fold; `evolve` is its only writer. `sources` holds the first and last number of each source,
    `reports` where an unfinished full report of a worker began."""

    pool: Pool = field(default_factory=Pool)
    holders: Holders = field(default_factory=Holders)
    parameters: Parameters = field(default_factory=Parameters)
    sources: dict[Source, tuple[int, int]] = field(default_factory=dict)
    runs: dict[WorkerId, WorkerRuns] = field(default_factory=dict)
    reports: dict[WorkerId, Place] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    def take(self) -> Changes:
        """What has changed since the last call."""
        changes, self.changes = self.changes, Changes()
        return changes

    def is_repeat(self, record: Record) -> bool:
        """Whether the source has had an event of this number, or a later one, recorded."""
        if record.source is None or record.source_seq is None:
            return False
        span = self.sources.get(Source(record.source))
        return span is not None and record.source_seq <= span[1]

    def check(self) -> None:
        """The parts agree with each other."""
        self.holders.check()
        assert self.runs.keys() <= self.holders.workers.keys(), "runs of a worker that does not exist"
        for worker in self.holders.workers:
            self.runs.get(worker, WorkerRuns()).check(dict(self.holders.index.held(worker)))


def evolve(models: ReadModels, log: str, place: Place, record: Record) -> None:
    """Fold one row of the record. Never fails: an event that breaks a rule of the folds is noted in `unfolded`."""
    if record.source is not None and record.source_seq is not None:
        source = Source(record.source)
        first, _ = models.sources.get(source, (record.source_seq, 0))
        models.sources[source] = first, record.source_seq
        models.changes.sources.add(source)
    if record.event is None:
        _note(models, place, "the bytes are no event" if record.id is None else "a field has the wrong form")
        return
    watched = models.holders.watcher = BlockChanges()
    try:
        _fold(models, place, Stored(log, place.seq, record.event))
    except FAULTS as fault:
        _note(models, place, f"{type(fault).__name__}: {fault}"[:FAULT_CHARS_MAX])
    _settle_runs(models, watched)
    if isinstance(record.event.data, EpochCommitted):
        _forget_retired(models, record.event.data.node)


def _note(models: ReadModels, place: Place, fault: str) -> None:
    models.changes.add(Patch("unfolded", {"log": place.log, "stream_seq": place.seq, "error": fault}))


def _fold(models: ReadModels, place: Place, stored: Stored) -> None:
    """All of what an event changes in rows, or nothing of it if a fold finds a fault in it."""
    told = [*patches(place, stored), *_ends(models, place, stored)]
    for patch in told:
        _check_key(patch)
    _mark(models, stored.data)
    pool_fold.evolve(models.pool, stored)
    holders_fold.evolve(models.holders, stored)
    _mark(models, stored.data)
    match stored.data:
        case CacheReported() as data:
            _follow_report(models, place, data)
        case ParametersChanged() | Frozen() | Thawed() as data:
            models.parameters = parameters_fold.evolve(models.parameters, stored)
            told.append(_parameters(models.parameters, place, stored, data))
        case _:
            pass
    for patch in told:
        models.changes.add(patch)


def _check_key(patch: Patch) -> None:
    for name in PATCHED_TABLES[patch.table]:
        value = patch.row[name]
        if isinstance(value, str) and len(value) > KEY_CHARS_MAX:
            raise ValueError(f"{name}: {len(value)} characters; a name has at most {KEY_CHARS_MAX}")


def _ends(models: ReadModels, place: Place, stored: Stored) -> list[Patch]:
    """Each request's first end counts; the audit reports a second one."""
    match stored.data:
        case RequestReceived() as received if stored.event.source in models.holders.lost_routers:
            return [end_at_once(place, stored, received.request)]
        case ended if isinstance(ended, ENDS):
            known = ended.request in models.holders.ended
            return [] if known else [end(place, stored, ended.request)]
        case RouterLost() as lost:
            return [
                end(place, stored, request) for request, source in models.holders.open.items() if source == lost.source
            ]
        case _:
            return []


def _mark(models: ReadModels, data: EventData) -> None:
    """Note whose rows an event changes. Called before and after the fold: workers come and go in it."""
    changes = models.changes
    match data:
        case NodeRegistered() | NodeLost() | NodeDeclaredLost() | EpochCommitted():
            changes.nodes.add(data.node)
            changes.caches.update(each for each in models.holders.workers if node_of(each) == data.node)
        case RankAdoptedEpoch() | DrainStarted() | EpochAborted() | Cordoned() | Uncordoned():
            changes.nodes.add(data.node)
        case BlocksStored() | BlocksEvicted() | CacheReported():
            changes.caches.add(data.worker)
        case _:
            pass


def _follow_report(models: ReadModels, place: Place, data: CacheReported) -> None:
    held = models.holders.workers.get(data.worker)
    if held is None or not held.report_parts:
        models.reports.pop(data.worker, None)
    elif data.part == 1:
        models.reports[data.worker] = place


def _settle_runs(models: ReadModels, watched: BlockChanges) -> None:
    for worker in sorted(watched.gone.keys() | watched.new.keys()):
        runs = models.runs.setdefault(worker, WorkerRuns())
        changed = settle(runs, watched.gone.get(worker, set()), watched.new.get(worker, {}))
        models.changes.runs.setdefault(worker, set()).update(changed)


def _forget_retired(models: ReadModels, node: NodeId) -> None:
    retired = [each for each in models.runs if node_of(each) == node and each not in models.holders.workers]
    for worker in retired:
        del models.runs[worker]
        models.reports.pop(worker, None)


def _parameters(
    parameters: Parameters, place: Place, stored: Stored, data: ParametersChanged | Frozen | Thawed
) -> Patch:
    row: Row = {"log": place.log, "stream_seq": place.seq, "time_ns": stored.event.time_ns, "type": stored.event.type}
    row |= {"asked_by": data.asked_by, "reason": data.reason, "value": parameters.model_dump(mode="json")}
    row["changes"] = data.changes if isinstance(data, ParametersChanged) else {}
    return Patch("parameters", row)
