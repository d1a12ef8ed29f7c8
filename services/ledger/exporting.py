"""The record out of the database into a bundle: from its beginning, because every state is folded from there, or from a seal
on, with the state that stands for everything before it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

from services.ledger import database, partial, reading, seals, snapshots
from services.ledger.bundles import (
    STATE_PIECE_BYTES,
    VERSION,
    VERSION_OF_PARTS,
    BundleWriter,
    ChainResumes,
    Gap,
    Header,
    LogBegins,
    LogEnds,
    PartBegins,
    Row,
    SnapshotRow,
    StatePiece,
)
from services.ledger.partial import Beginning
from services.ledger.patches import Place
from services.ledger.reading import LogInfo
from services.ledger.records import BIGINT_MAX, CHAIN_ORIGIN, LOG_TABLES, LogTable, link, record
from shared.contracts.events import BlockDayDropped, DroppedRun
from shared.runtime.states import BadState

FIRST_LATER = """
SELECT least((SELECT min(stream_seq) FROM decisions WHERE log = $1 AND stream_seq > $3 AND time_ns > $2),
             (SELECT min(stream_seq) FROM block_events WHERE log = $1 AND stream_seq > $3 AND time_ns > $2))
"""


class Begins(NamedTuple):
    """Behind which sealed snapshot a bundle begins, and what the deciders had folded there, frozen."""

    place: Place
    deciders: bytes


class NotExported(Exception):
    """The record has nothing up to there, cannot be cut there, or is not whole. The message says which, and where."""


class Exported(NamedTuple):
    """What is in the bundle."""

    logs: int
    rows: int
    to_seq: int
    """The last sequence of the last log."""
    after_seq: int
    """Behind which sequence of the first log it begins."""


async def export(
    database_url: str,
    file: BinaryIO,
    to_seq: int = BIGINT_MAX,
    to_ns: int = BIGINT_MAX,
    progress: Callable[[int], None] | None = None,
    begins: Begins | None = None,
) -> Exported:
    """Write everything up to `to_seq` of the newest log, or before the first event that was sent later than `to_ns`; with
    `begins` only what lies behind it, and the state there. A record that is a part itself is written with its own beginning.

    One snapshot of the database, a page at a time. Every row's link is compared on the way, so that no bundle is made which
    cannot be taken in. `progress` is told how many rows so far. Errors: NotExported; those of `database.connect`.
    """
    async with database.whole_view(database_url) as connection:
        logs = await reading.logs(connection)
        parts = await _cut(connection, logs, to_seq, to_ns)
        begun = await _beginning(connection, begins)
        if begun is not None:
            logs = [log for log in logs if log.number >= begun.place.log]
            parts = await _behind(connection, [log for log in parts if log.number >= begun.place.log], begun)
        gone = await _gone(connection, logs, parts)
        pool = await connection.fetchval("SELECT pool FROM logs WHERE log = $1", parts[0].log)
        writer = BundleWriter(file, Header(pool=pool, version=VERSION_OF_PARTS if begun else VERSION))
        copy = _Copy(connection, writer, gone, progress, begun)
        for part, log in zip(parts, logs, strict=False):
            await copy.log(part, whole=part.stream_seq == log.stream_seq)
        writer.close()
        return Exported(len(parts), writer.rows, parts[-1].stream_seq, parts[0].after_seq)


class _Copy:
    """Log after log into one bundle; the chains go through all of them."""

    def __init__(
        self,
        connection: Any,
        writer: BundleWriter,
        gone: list[BlockDayDropped],
        progress: Callable[[int], None] | None,
        begun: Beginning | None,
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._gone = gone
        self._heads: dict[LogTable, bytes] = dict.fromkeys(LOG_TABLES, CHAIN_ORIGIN)
        self._progress = progress
        self._begun = begun

    async def log(self, part: LogInfo, *, whole: bool) -> None:
        """Every row of the log up to where it was cut."""
        self._writer.tell(await _begins(self._connection, part))
        if part.begins is not None:
            self._heads = dict(part.begins.heads)
            await self._state()
        named = (
            run for day in self._gone for run in day.runs if run.log == str(part.log) and run.from_seq > part.after_seq
        )
        runs = deque(sorted(named, key=lambda run: run.from_seq))
        async for page in reading.pages(self._connection, part, part.stream_seq):
            for row in page:
                self._resume(runs, row.stream_seq)
                # A run is without block events of other days, so what lies within one is still waiting to go.
                if row.table != "block_events" or not runs or row.stream_seq < runs[0].from_seq:
                    self._row(part, Row(row.table, row.stream_seq, row.chain, row.raw))
            if self._progress is not None:
                self._progress(self._writer.rows)
        self._resume(runs, part.stream_seq + 1)
        if whole and self._heads != part.heads:
            raise NotExported(f"log {part.log}: the chains do not end where the checkpoint says: see `events audit`")
        self._writer.tell(LogEnds(stream_seq=part.stream_seq, heads=dict(self._heads)))

    async def _state(self) -> None:
        """The sealed snapshot at the beginning, and the state that stands for what is before."""
        begun = self._begun
        assert begun is not None, "a part has a beginning"
        async for model, value in snapshots.rows(self._connection, begun.place):
            self._writer.tell(SnapshotRow(model=model, value=value))
        for of, content in (("models", begun.models), ("deciders", begun.deciders)):
            for at in range(0, len(content), STATE_PIECE_BYTES):
                piece = content[at : at + STATE_PIECE_BYTES]
                self._writer.tell(StatePiece(of="models" if of == "models" else "deciders", content=piece))

    def _row(self, part: LogInfo, row: Row) -> None:
        self._heads[row.table] = link(self._heads[row.table], row.raw)
        if self._heads[row.table] != row.chain:
            raise NotExported(f"{row.table} {part.log}:{row.stream_seq}: the chain breaks here: see `events audit`")
        self._writer.tell(row)

    def _resume(self, runs: deque[DroppedRun], before_seq: int) -> None:
        while runs and runs[0].to_seq < before_seq:
            self._heads["block_events"] = runs.popleft().chain
            self._writer.tell(ChainResumes(head=self._heads["block_events"]))


async def _cut(connection: Any, logs: Sequence[LogInfo], to_seq: int, to_ns: int) -> list[LogInfo]:
    """The logs, the last of them only as far as asked. A cut in an accepted gap is one before it; one by time is behind the
    last snapshot that was made by then, as for `replay --at`."""
    parts: list[LogInfo] = []
    sent = await snapshots.before_time(connection, to_ns)
    for log in logs:
        last = min(log.stream_seq, to_seq) if log is logs[-1] else log.stream_seq
        if to_ns < BIGINT_MAX and not (sent and log.number < sent.log):
            before_seq = sent.seq if sent and sent.log == log.number else 0
            bounds = (log.log, to_ns, before_seq)
            later = await connection.fetchval(FIRST_LATER, *bounds, timeout=seals.STATEMENT_LIMIT_S)
            last = last if later is None else min(last, later - 1)
        last = next((first - 1 for first, behind in log.gaps if first <= last < behind), last)
        if last:
            gaps = tuple(gap for gap in log.gaps if gap[1] <= last)
            parts.append(log._replace(stream_seq=last, gaps=gaps))
        if last < log.stream_seq:
            break
    if not parts:
        raise NotExported("the record is empty" if not logs else "the record begins after that")
    return parts


async def _beginning(connection: Any, begins: Begins | None) -> Beginning | None:
    if begins is None:
        return await partial.beginning(connection)
    try:
        models = await partial.frozen_at(connection, begins.place)
    except BadState as error:
        raise NotExported(f"the state at {begins.place.seq}: {error}") from error
    return Beginning(begins.place, models, begins.deciders)


async def _behind(connection: Any, parts: Sequence[LogInfo], begun: Beginning) -> list[LogInfo]:
    """The logs behind the beginning, which a seal within them has to vouch for."""
    place = begun.place
    if not parts or parts[0].number != place.log or parts[0].stream_seq <= place.seq:
        raise NotExported(f"the range ends before {place.seq}, where the state at its beginning was kept")
    first = parts[0]
    seq, sealed = (await partial.sealed_places(connection, place.log, first.log)).get(place, (BIGINT_MAX, None))
    if sealed is None or seq > first.stream_seq:
        raise NotExported(f"the seal of the state at {place.seq} is not in the range: let it end later")
    heads = await partial.heads_at(connection, place)
    if seals.head(heads) != sealed.head or await snapshots.digest(connection, place) != sealed.snapshot:
        raise NotExported(f"what was sealed at {place.seq} is not what is there: see `events audit`")
    gaps = tuple(gap for gap in first.gaps if gap[0] > place.seq)
    return [first._replace(begins=reading.Begins(place.seq, heads), gaps=gaps), *parts[1:]]


async def _gone(connection: Any, logs: Sequence[LogInfo], parts: Sequence[LogInfo]) -> list[BlockDayDropped]:
    """The days that the exported part says are dropped; their rows are left out, though some may wait to go.

    A part that ends before this was said cannot do without rows that have gone since.
    """
    reach = {part.log: part.stream_seq for part in parts}
    kept = {day.isoformat() for day in await seals.kept_days(connection)}
    gone: list[BlockDayDropped] = []
    for log in logs:
        after_seq = next((part.after_seq for part in parts if part.log == log.log), 0)
        for told in await reading.told(connection, log.log, [BlockDayDropped.TYPE]):
            event = record(told).event
            said = event.data if event is not None else None
            if not isinstance(said, BlockDayDropped) or told.stream_seq <= after_seq:
                continue  # Its fields are wrong: it drops nothing. Or what it has dropped lies before the beginning.
            if told.stream_seq <= reach.get(log.log, 0):
                gone.append(said)
            elif said.day not in kept:
                raise NotExported(
                    f"block events of {said.day} are gone, as {log.log}:{told.stream_seq} says: export up to there or beyond"
                )
    return gone


async def _begins(connection: Any, part: LogInfo) -> LogBegins:
    row = await connection.fetchrow("SELECT stream, opened_at FROM logs WHERE log = $1", part.log)
    gaps = await connection.fetch(
        "SELECT from_seq, to_seq, accepted_at, accepted_by, reason FROM gaps WHERE log = $1 AND to_seq <= $2 "
        "AND from_seq > $3 ORDER BY from_seq",
        part.log,
        part.stream_seq,
        part.after_seq,
    )
    return LogBegins(
        log=part.log,
        number=part.number,
        stream=row["stream"],
        opened_at=row["opened_at"],
        predecessor=part.predecessor,
        predecessor_seq=part.predecessor_seq,
        gaps=tuple(Gap(**gap) for gap in gaps),
        begins=PartBegins(stream_seq=part.begins.stream_seq, heads=part.begins.heads) if part.begins else None,
    )
