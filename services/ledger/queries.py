"""Reading the record and the read models. Every answer is bounded."""

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from services.ledger.records import BLOCK_EVENT_TYPES, LogTable
from shared.contracts.ids import client_digest

EVENTS_MAX = 1_000
REQUEST_EVENTS_MAX = 1_000
REQUESTS_OF_CLIENT_MAX = 100
WINDOWS_MAX = 1_000
EPOCHS_MAX = 200

Json = dict[str, Any]
_COLUMNS = "log, stream_seq, id, type, version, pool, source, source_seq, time_ns, correlation, causation, raw"


class EventFilter(NamedTuple):
    """What `events` shall return; None for any."""

    type: str | None = None
    correlation: str | None = None
    source: str | None = None


async def newest_log(connection: Any) -> UUID | None:
    """The active log, None in an empty record."""
    found: UUID | None = await connection.fetchval("SELECT log FROM logs ORDER BY number DESC LIMIT 1")
    return found


async def events(connection: Any, log: UUID, after_seq: int, wanted: EventFilter, limit: int) -> list[Json]:
    """Events of one log in stream order, at most `limit`."""
    conditions = ["log = $1", "stream_seq > $2"]
    values: list[Any] = [log, after_seq]
    for column, value in wanted._asdict().items():
        if value is not None:
            values.append(value)
            conditions.append(f"{column} = ${len(values)}")
    found = []
    for table in _tables_of(wanted.type):
        found += await connection.fetch(
            f"SELECT {_COLUMNS} FROM {table} WHERE {' AND '.join(conditions)} "  # noqa: S608 - values are parameters
            f"ORDER BY stream_seq LIMIT {min(limit, EVENTS_MAX)}",
            *values,
        )
    return [_event(row) for row in sorted(found, key=lambda row: row["stream_seq"])[:limit]]


async def event_of_id(connection: Any, event_id: UUID) -> Json | None:
    """The event with this id."""
    return await _one(connection, "id = $1", event_id)


async def event_at(connection: Any, log: UUID, stream_seq: int) -> Json | None:
    """The event at a place of the record; repeats are not found."""
    return await _one(connection, "log = $1 AND stream_seq = $2", log, stream_seq)


async def request(connection: Any, name: str) -> Json | None:
    """One request: its row, and its events in the order of the record. None if the record has neither."""
    row = await connection.fetchrow("SELECT * FROM requests WHERE request = $1", name)
    found = await connection.fetch(f"{_OF_REQUEST} ORDER BY number, stream_seq", name)
    if row is None and not found:
        return None
    return {"request": _plain(row) if row else None, "events": [_event(each) for each in found]}


_OF_REQUEST = " UNION ALL ".join(
    f"(SELECT l.number, {_COLUMNS.replace('log,', 'e.log,', 1).replace('pool', 'e.pool')} FROM {table} e "  # noqa: S608
    f"JOIN logs l USING (log) WHERE e.correlation = $1 ORDER BY l.number, e.stream_seq LIMIT {REQUEST_EVENTS_MAX})"
    for table in ("decisions", "block_events")
)


class Named(NamedTuple):
    """The request that is meant, what `request` says of it, and earlier ones that had the same name, newest first."""

    request: str
    told: Json
    earlier: list[str]


async def request_named(connection: Any, name: str) -> Named | None:
    """What `name` may mean: the request with this id, as the record or an answer (`chatcmpl-…`) has it, else the newest one to
    which its client gave it, else the one that an event with this id is about (`x-vertumnus-decision`)."""
    as_id = name.rpartition("cmpl-")[2]
    if (told := await request(connection, as_id)) is not None:
        return Named(as_id, told, [])
    sql = "SELECT request FROM requests WHERE client_digest = $1 ORDER BY received_log DESC, received_seq DESC LIMIT $2"
    rows = await connection.fetch(sql, client_digest(name), REQUESTS_OF_CLIENT_MAX)
    if not rows:
        return await _request_of_event(connection, as_id)
    newest, *earlier = [row["request"] for row in rows]
    told = await request(connection, newest)
    assert told is not None, "what has a row is in the record"
    return Named(newest, told, earlier)


async def _request_of_event(connection: Any, name: str) -> Named | None:
    try:
        found = await event_of_id(connection, UUID(name))
    except ValueError:
        return None
    about = found.get("correlation") if found else None
    told = await request(connection, about) if about else None
    return Named(str(about), told, []) if told else None


async def state(connection: Any) -> Json:
    """What the pool is now, as far as it has been copied: one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        checkpoint = await connection.fetchrow(
            "SELECT c.log, c.stream_seq, c.gap_to FROM checkpoints c JOIN logs l USING (log) ORDER BY l.number DESC LIMIT 1"
        )
        parts = {
            "nodes": "SELECT * FROM nodes ORDER BY node",
            "workers": "SELECT w.*, c.trust, c.blocks FROM workers w LEFT JOIN caches c USING (worker) ORDER BY 2, 3",
            "epochs": (
                f"SELECT * FROM epochs ORDER BY log DESC, COALESCE(ended_ns, planned_ns) DESC LIMIT {EPOCHS_MAX}"  # noqa: S608
            ),
            "parameters": "SELECT * FROM parameters ORDER BY log DESC, stream_seq DESC LIMIT 1",
        }
        rows = {name: [_plain(row) for row in await connection.fetch(sql)] for name, sql in parts.items()}
        open_requests = await connection.fetchval("SELECT count(*) FROM requests WHERE ended IS NULL")
    return {"checkpoint": _plain(checkpoint) if checkpoint else None, "open_requests": open_requests, **rows}


async def windows(connection: Any, limit: int) -> list[Json]:
    """The newest observation windows, newest first."""
    rows = await connection.fetch("SELECT * FROM windows ORDER BY log DESC, k DESC LIMIT $1", min(limit, WINDOWS_MAX))
    return [_plain(row) for row in rows]


def _tables_of(event_type: str | None) -> tuple[LogTable, ...]:
    if event_type is None:
        return ("decisions", "block_events")
    return ("block_events",) if event_type in BLOCK_EVENT_TYPES else ("decisions",)


async def _one(connection: Any, condition: str, *values: Any) -> Json | None:
    for table in _tables_of(None):
        row = await connection.fetchrow(f"SELECT {_COLUMNS} FROM {table} WHERE {condition}", *values)  # noqa: S608
        if row is not None:
            return _event(row)
    return None


def _event(row: Any) -> Json:
    """The place and the published event; bytes that are no event come as base64."""
    place = {"log": str(row["log"]), "stream_seq": row["stream_seq"]}
    if row["id"] is None:
        return {**place, "type": row["type"], "raw": base64.b64encode(row["raw"]).decode()}
    return {**place, **orjson.loads(row["raw"])}


def _plain(row: Mapping[str, Any]) -> Json:
    """A row as JSON: documents parsed, ids as text."""
    return {name: _value(name, value) for name, value in row.items()}


_DOCUMENTS = frozenset(
    {
        "composition",
        "draining",
        "adopted",
        "spec",
        "data",
        "changes",
        "value",
        "sources",
        "old_composition",
        "new_composition",
    }
)


def _value(name: str, value: Any) -> Any:
    if name in _DOCUMENTS and isinstance(value, str):
        return orjson.loads(value)
    return str(value) if isinstance(value, UUID) else value
