"""The events of the record as services folded them: repeats and what is no event left out, gaps pointed at."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import orjson

from replay.beginnings import TYPES, Past, Registration, registration
from replay.freezing import Frozen, read
from services.ledger import reading, seals, snapshots, states
from services.ledger.loading import load_caches
from services.ledger.patches import Place
from services.ledger.queries import Json
from services.ledger.reading import LogInfo
from services.ledger.readmodels import ReadModels
from services.ledger.records import Arrival
from shared.contracts.codec import BadEvent, decode
from shared.contracts.envelope import Stored, UnknownEvent
from shared.model.holders import Holders
from shared.runtime.states import BadState


async def registrations(connection: Any, log: UUID) -> list[Registration]:
    """What each process of the log said of its beginning."""
    rows = await reading.told(connection, log, TYPES)
    stories = (stored for row in rows if (stored := published(str(log), row)) is not None)
    return [found for stored in stories if (found := registration(stored)) is not None]


class Folder(Protocol):
    """Who folds a log of which parts are missing, and is told where."""

    def miss(self) -> None:
        """Events are missing here."""

    def lose_blocks(self) -> None:
        """Block events went by policy here; every decision is still there."""

    def regain_blocks(self, held: Holders) -> None:
        """What workers held here is known again."""

    def resume(self, frozen: Frozen) -> None:
        """What deciders had folded here is known again."""


class Hole(NamedTuple):
    """Where something is missing, or known again, and who is to be told of it before what follows."""

    seq: int
    tell: Callable[[], Awaitable[None]]


async def holes(connection: Any, log: LogInfo, folder: Folder, after_seq: int = 0) -> list[Hole]:
    """Accepted gaps, days of block events that went by policy, and the snapshots and kept states behind those; of a log that is
    folded from `after_seq` on."""

    async def miss() -> None:
        folder.miss()

    async def lose() -> None:
        folder.lose_blocks()

    def regain(at: Place) -> Callable[[], Awaitable[None]]:
        async def tell() -> None:
            models = ReadModels()
            await load_caches(connection, models, at)
            folder.regain_blocks(models.holders)

        return tell

    def resume(at: Place) -> Callable[[], Awaitable[None]]:
        async def tell() -> None:
            try:
                folder.resume(read(await states.content(connection, at)))
            except BadState:
                # Another version has kept it: what is known without it stays.
                return

        return tell

    gone = await seals.gone_days(connection)
    runs = [run for day in gone for run in day.runs if run.log == str(log.log)]
    known = [place for place in await snapshots.behind_drops(connection, gone) if place.log == log.number]
    found = [Hole(first, miss) for first, _ in log.gaps] + [Hole(run.from_seq, lose) for run in runs]
    found += [Hole(place.seq + 1, regain(place)) for place in known]
    kept = await states.places(connection, log.number)
    behind = {next((seq for seq in kept if seq >= run.to_seq), 0) for run in runs} - {0}
    found += [Hole(seq + 1, resume(Place(log.number, seq))) for seq in behind]
    return sorted((hole for hole in found if hole.seq > after_seq + 1), key=lambda hole: hole.seq)


async def pages(
    connection: Any,
    log: LogInfo,
    missing: Sequence[Hole] = (),
    to_seq: int | None = None,
    after_seq: int | None = None,
) -> AsyncIterator[list[Stored]]:
    """The events of one log page by page, as services folded them; from the record's first on, or behind `after_seq`."""
    ahead = list(missing)
    begin = log.after_seq if after_seq is None else after_seq
    async for page in reading.stories(connection, log.log, begin, log.stream_seq if to_seq is None else to_seq):
        told = [stored for row in page if (stored := published(str(log.log), row)) is not None]
        while ahead and told and told[-1].stream_seq >= ahead[0].seq:
            hole = ahead.pop(0)
            before = [each for each in told if each.stream_seq < hole.seq]
            yield before
            await hole.tell()
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
    """What the logs before `log` have left to it; of a log that is a part, what lies before its beginning. Errors: BadState."""
    if log.begins is not None:
        return [each._replace(kept=True) for each in (await _past(connection, log)).events]
    legacy: list[Stored] = []
    for earlier in (each for each in logs if each.number < log.number):
        past = Past(legacy) if earlier.begins is None else await _past(connection, earlier)
        async for page in pages(connection, earlier):
            for each in page:
                past.fold(each)
        legacy = past.legacy()
    return legacy


async def _past(connection: Any, log: LogInfo) -> Past:
    return read(await states.content(connection, Place(log.number, log.after_seq))).past
