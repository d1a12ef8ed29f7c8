"""The events of the record as services folded them: repeats and what is no event left out, gaps pointed at."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from uuid import UUID

import orjson

from replay.beginnings import TYPES, Past, Registration, registration
from services.ledger import reading, seals
from services.ledger.queries import Json
from services.ledger.reading import LogInfo
from services.ledger.records import Arrival
from shared.contracts.codec import BadEvent, decode
from shared.contracts.envelope import Stored, UnknownEvent


async def registrations(connection: Any, log: UUID) -> list[Registration]:
    """What each process of the log said of its beginning."""
    rows = await reading.told(connection, log, TYPES)
    stories = (stored for row in rows if (stored := published(str(log), row)) is not None)
    return [found for stored in stories if (found := registration(stored)) is not None]


Hole = tuple[int, Callable[[], None]]
"""Where something is missing, and who is to be told of it before what follows."""


async def holes(connection: Any, log: LogInfo, miss: Callable[[], None], lose_blocks: Callable[[], None]) -> list[Hole]:
    """Accepted gaps, and days of block events that went by policy."""
    days = await seals.dropped_days(connection)
    kept = {day.isoformat() for day in await seals.kept_days(connection)}
    runs = [run for day in days if day.day not in kept for run in day.runs if run.log == str(log.log)]
    found = [(first, miss) for first, _ in log.gaps] + [(run.from_seq, lose_blocks) for run in runs]
    return sorted(found, key=lambda hole: hole[0])


async def pages(
    connection: Any, log: LogInfo, missing: Sequence[Hole] = (), to_seq: int | None = None
) -> AsyncIterator[list[Stored]]:
    """The events of one log page by page, as services folded them."""
    ahead = list(missing)
    async for page in reading.stories(connection, log.log, 0, log.stream_seq if to_seq is None else to_seq):
        told = [stored for row in page if (stored := published(str(log.log), row)) is not None]
        while ahead and told and told[-1].stream_seq >= ahead[0][0]:
            seq, tell = ahead.pop(0)
            before = [each for each in told if each.stream_seq < seq]
            yield before
            tell()
            told = told[len(before) :]
        yield told


def published(log: str, row: Arrival) -> Stored | None:
    """The event as services read it; None for bytes that they do not fold."""
    try:
        event = decode(row.raw)
    except BadEvent:
        return None
    return None if isinstance(event.data, UnknownEvent) else Stored(log, row.stream_seq, event)


def stored(event: Json) -> Stored:
    """An event that a query has answered, with its place. BadEvent if it cannot be read."""
    published_as = {name: value for name, value in event.items() if name not in ("log", "stream_seq")}
    return Stored(event["log"], event["stream_seq"], decode(orjson.dumps(published_as)))


async def inherited(connection: Any, logs: Sequence[LogInfo], log: LogInfo) -> list[Stored]:
    """What the logs before `log` have left to it."""
    legacy: list[Stored] = []
    for earlier in logs[: log.number - 1]:
        past = Past(legacy)
        async for page in pages(connection, earlier):
            for each in page:
                past.fold(each)
        legacy = past.legacy()
    return legacy
