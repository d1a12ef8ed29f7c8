"""The whole state of the pool as of an instant: the folds behind the read models, run up to there.

The record's read models say what is now. This folds the same events with the same code (`services/ledger/readmodels.py`),
from the last snapshot before the instant, and stops.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from replay.garbage import seldom_collected
from services.ledger import database, partial, reading, seals, snapshots
from services.ledger.patches import Place
from services.ledger.queries import Json
from services.ledger.reading import LogInfo
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import Record, record
from services.ledger.tables import node_row

OPEN_REQUESTS_MAX = 1_000
"""More are counted, not listed."""

START = Place(0, 0)
"""Before the record's first event."""


class Instant(NamedTuple):
    """A sequence of the newest log, or nanoseconds since 1970 by the senders' clocks."""

    number: int
    is_seq: bool


class Nothing(LookupError):
    """The record does not cover the instant. The message says what it covers."""


async def states(
    database_url: str, instants: Sequence[Instant], progress: Callable[[int], None] | None = None
) -> list[Json]:
    """The state as of each instant, in their order: everything that lies up to it. One pass over one view of the database.

    An instant by time ends before the first event that was sent later, behind the last snapshot that was made by then: what
    lies before that was sent before it, whatever a clock that was ahead has said. Errors: Nothing; those of `database.connect`.
    """
    async with database.view(database_url) as connection:
        logs = await reading.logs(connection)
        covered = await _covered(connection, logs)
        if any(each.is_seq and each.number > logs[-1].stream_seq for each in instants):
            raise Nothing(f"the record ends before that instant: {covered}")
        with seldom_collected():
            told = await _Pass(connection, logs, instants, progress).run()
        if any(not each["place"] for each in told) or _any_before(logs[0], instants, told):
            raise Nothing(f"the record begins after that instant: {covered}")
        return told


class _Pass:
    """Folds once over all instants. `_place` is the last event folded, `_from` the snapshot before the first one."""

    def __init__(
        self,
        connection: Any,
        logs: Sequence[LogInfo],
        instants: Sequence[Instant],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._connection = connection
        self._logs = logs
        self._waiting = dict(enumerate(instants))
        self._progress = progress
        self._told: dict[int, Json] = {}
        self._models = ReadModels()
        self._place: Json = {}
        self._reached = START
        self._at_least: dict[int, Place] = {}
        """What each instant covers for certain."""
        self._from: Json | None = None

    async def run(self) -> list[Json]:
        start = await self._begin()
        dropped = await self._dropped(start)
        async for log, event in self._events(start):
            newest = log is self._logs[-1]
            place = Place(log.number, event.stream_seq)
            for at, instant in list(self._waiting.items()):
                number = event.stream_seq if instant.is_seq else event.time_ns or 0
                if number > instant.number and (newest or not instant.is_seq) and place > self._at_least[at]:
                    self._tell(at, dropped)
            if not self._waiting:
                break
            evolve(self._models, str(log.log), place, event)
            self._reached = place
            self._place = {"log": str(log.log), "stream_seq": event.stream_seq, "time_ns": event.time_ns}
        for at in list(self._waiting):
            self._tell(at, dropped)
        return [self._told[at] for at in sorted(self._told)]

    async def _begin(self) -> Place:
        """Load the last snapshot before all instants, if there is one."""
        for at, instant in self._waiting.items():
            self._at_least[at] = await self._before(instant) or START
        start = min(self._at_least.values())
        if (begins := self._logs[0].begins) is not None:
            # There is no other snapshot in a part of a record.
            start = Place(self._logs[0].number, begins.stream_seq)
        if start == START:
            return start
        self._models = await partial.models_at(self._connection, start)
        log = next(each for each in self._logs if each.number == start.log)
        time_ns = await _time(self._connection, log.log, start.seq)
        self._place = {"log": str(log.log), "stream_seq": start.seq, "time_ns": time_ns}
        self._reached, self._from = start, {"log": str(log.log), "stream_seq": start.seq}
        return start

    async def _before(self, instant: Instant) -> Place | None:
        if instant.is_seq:
            return await snapshots.before_seq(self._connection, Place(self._logs[-1].number, instant.number))
        return await snapshots.before_time(self._connection, instant.number)

    async def _dropped(self, start: Place) -> list[Place]:
        """Where runs of rows that have gone begin behind `start`: from there on caches are not known."""
        numbers = {str(log.log): log.number for log in self._logs}
        runs = [run for day in await seals.gone_days(self._connection) for run in day.runs if run.log in numbers]
        return [place for run in runs if (place := Place(numbers[run.log], run.from_seq)) > start]

    async def _events(self, start: Place) -> AsyncIterator[tuple[LogInfo, Record]]:
        events = 0
        for log in (each for each in self._logs if each.number >= start.log):
            after_seq = start.seq if log.number == start.log else log.after_seq
            async for page in reading.stories(self._connection, log.log, after_seq, log.stream_seq):
                for row in page:
                    yield log, record(row)
                self._models.take()
                events += len(page)
                if self._progress is not None:
                    self._progress(events)

    def _tell(self, at: int, dropped: Sequence[Place]) -> None:
        known = not any(place <= self._reached for place in dropped)
        self._told[at] = {**state(self._models, self._place), "folded_from": self._from, "caches_known": known}
        del self._waiting[at]


async def _time(connection: Any, log: UUID, seq: int) -> int | None:
    found = [await connection.fetchval(sql, log, seq) for sql in _TIMES]
    return next((int(time_ns) for time_ns in found if time_ns is not None), None)


def _any_before(log: LogInfo, instants: Sequence[Instant], told: Sequence[Json]) -> bool:
    """Whether an instant lies before a part of a record begins."""
    if log.begins is None:
        return False
    nothing = {"log": str(log.log), "stream_seq": log.after_seq}
    return any(
        state["place"].items() >= nothing.items() and not (asked.is_seq and asked.number == log.after_seq)
        for asked, state in zip(instants, told, strict=True)
    )


_TIMES = [
    f"SELECT time_ns FROM {table} WHERE log = $1 AND stream_seq = $2"  # noqa: S608
    for table in ("decisions", "block_events")
]


async def _covered(connection: Any, logs: Sequence[LogInfo]) -> str:
    """What the record covers, in words. Errors: Nothing."""
    begin_ns = await connection.fetchval(_FIRST_TIME)
    if not logs or begin_ns is None:
        raise Nothing("the record is empty")
    end_ns = await connection.fetchval(_LAST_TIME, logs[-1].log)
    times = " to ".join(datetime.fromtimestamp(each / 1e9, UTC).isoformat() for each in (begin_ns, end_ns or begin_ns))
    return f"the record covers {logs[0].log}:{logs[0].after_seq + 1} to {logs[-1].log}:{logs[-1].stream_seq}, {times}"


_FIRST_TIME = """
SELECT d.time_ns FROM decisions d JOIN logs l USING (log) WHERE d.time_ns IS NOT NULL ORDER BY l.number, d.stream_seq LIMIT 1
"""
_LAST_TIME = """
SELECT time_ns FROM decisions WHERE log = $1 AND time_ns IS NOT NULL ORDER BY stream_seq DESC LIMIT 1
"""


def state(models: ReadModels, place: Json) -> Json:
    """A fold's state as JSON."""
    pool, holders = models.pool, models.holders
    return {
        "place": place,
        "parameters": models.parameters.model_dump(mode="json"),
        "nodes": {name: node_row(pool.nodes[name]) for name in sorted(pool.nodes)},
        "workers": {
            worker.id: {
                "worker": worker.id,
                "degree": worker.degree,
                "schedulable": pool.schedulable(worker),
                "trust": holders.trust(worker.id),
                "blocks": holders.index.counts.get(worker.id, 0),
            }
            for worker in sorted(pool.workers.values(), key=lambda each: (each.node, each.group.first_rank))
        },
        "open_requests": len(holders.open),
        "requests": sorted(holders.open)[:OPEN_REQUESTS_MAX],
        "blocks": len(holders.index.index),
    }


def differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every part in which two states differ, with both values; None where a part is missing."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [(path, one, other)]
    names = [*one, *(name for name in other if name not in one)]
    inside = (differences(one.get(name), other.get(name), f"{path}.{name}" if path else name) for name in names)
    return [difference for each in inside for difference in each]
