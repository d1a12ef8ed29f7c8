"""Seals the record every hour with a snapshot of its state, and lets days of block events go that policy keeps no longer.

A seal is published on the log: whoever has kept one can prove later that nothing before it was changed, whoever owns the
database. A day goes in three steps that each wait for the one before to be in the record: everything of it is sealed,
`block-day-dropped` says what the chain needs to go on without it, the partition is dropped.
"""

from datetime import UTC, date, datetime, timedelta
from typing import Any, NoReturn

import structlog

from services.ledger import database, seals, snapshots
from services.ledger.copier import Copier
from services.ledger.database import AWAY, SchemaMissing
from services.ledger.seals import Extent
from services.ledger.settings import LedgerSettings
from services.ledger.voice import Voice
from shared.contracts.events import BlockDayDropped, LogSealed
from shared.runtime.appending import Fenced
from shared.runtime.clock import Clock
from shared.runtime.ports import LogLost, Unavailable

LOOK_EVERY_S = 60.0
"""Or as often as the record is to be sealed."""


class Notary:
    """Works while its process's copier is the active one, on a connection of its own."""

    def __init__(self, copier: Copier, voice: Voice, settings: LedgerSettings, clock: Clock) -> None:
        self._copier = copier
        self._voice = voice
        self._settings = settings
        self._clock = clock
        self._said_seq = 0
        """Where our last word lies: nothing more is said before the copy has reached it."""
        self._logger = structlog.get_logger(component="notary")

    async def run(self) -> NoReturn:
        """Until cancelled. What fails is tried again: nothing waits for it."""
        while True:
            if self._copier.active:
                try:
                    await self._look()
                except (*AWAY, SchemaMissing, Unavailable, LogLost, Fenced) as error:
                    self._logger.warning("not sealed", error=f"{type(error).__name__}: {error}")
            await self._clock.sleep(min(LOOK_EVERY_S, self._settings.seal_every_s))

    async def _look(self) -> None:
        connection = await database.connect(self._settings.database_url.get_secret_value())
        try:
            async with connection.transaction(isolation="repeatable_read"):
                reached = await seals.extent(connection)
                due = reached is not None and await self._caught_up(reached) and self._is_due(reached)
                sealed = await self._seal(connection, reached) if reached and due else None
            if sealed is not None:
                self._said_seq = await self._voice.say(sealed)
                self._logger.info("sealed", to_seq=sealed.to_seq, rows=sealed.count, head=sealed.head.hex())
            elif reached is not None and self._settings.block_days_kept is not None:
                await self._let_days_go(connection, reached, self._settings.block_days_kept)
        finally:
            await connection.close()

    async def _seal(self, connection: Any, reached: Extent) -> LogSealed:
        kept = await snapshots.take(connection, reached, self._clock.now_ns())
        return await seals.seal(connection, reached, await snapshots.digest(connection, kept))

    async def _caught_up(self, reached: Extent) -> bool:
        """Whether all that any ledger has said is in the record: one that died may have spoken last."""
        if reached.stream_seq < self._said_seq:
            return False
        last = await self._voice.last_said()
        return last is None or last.stream_seq <= reached.stream_seq

    def _is_due(self, reached: Extent) -> bool:
        """A log in which nothing but the last seal has happened is not sealed again. What came while that seal was on its way
        lies before it and is not covered by it."""
        if reached.stream_seq <= max(reached.sealed_seq, reached.sealed_at_seq) <= reached.sealed_seq + 1:
            return False
        age_ns = self._clock.now_ns() - (reached.sealed_ns or 0)
        return age_ns >= self._settings.seal_every_s * 1e9

    async def _let_days_go(self, connection: Any, reached: Extent, kept_days: int) -> None:
        """At most one day at a look, the oldest first."""
        today = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC).date()
        old = [day for day in await seals.kept_days(connection) if day < today - timedelta(days=kept_days)]
        if not old or not await self._caught_up(reached):
            return
        day = old[0]
        said = {each.day for each in await seals.dropped_days(connection)}
        if day.isoformat() in said:
            await connection.execute("SELECT drop_block_day($1)", day)
            self._logger.info("day dropped", day=day.isoformat())
        else:
            await self._say_dropped(connection, day, reached, kept_days)

    async def _say_dropped(self, connection: Any, day: date, reached: Extent, kept_days: int) -> None:
        runs = await seals.runs(connection, day, reached)
        if runs is None:
            self._logger.warning("day kept: it is not sealed, or its rows lie in too many pieces", day=day.isoformat())
            return
        self._said_seq = await self._voice.say(BlockDayDropped(day=day.isoformat(), kept_days=kept_days, runs=runs))
