"""Stores what must outlive the events that the log drops, next to the log: after each change, and now and then.

The leader writes. One that was overtaken and does not know it yet cannot put an older record over a newer one: it replaces
only what it has read, and what it has read was older.
"""

from typing import NoReturn

import structlog

from shared.model.keepsake import Keepsake
from shared.runtime.clock import Clock
from shared.runtime.keepsake import BadKeepsake, is_newer, pack
from shared.runtime.leadership import Leadership
from shared.runtime.ports import Cell, Unavailable, WrongLastSequence

LOOK_EVERY_S = 0.5
RETRY_EVERY_S = 2.0

REFRESH_NS = 10_000_000_000
"""Without a change: how far the record may fall behind the log's beginning, which is younger only in a log of seconds."""


class Keeper:
    """`keepsake` is the controller's fold; `log` names the log it is folded from."""

    def __init__(self, keepsake: Keepsake, leadership: Leadership, cell: Cell, log: str, clock: Clock) -> None:
        self._keepsake = keepsake
        self._leadership = leadership
        self._cell = cell
        self._log = log
        self._clock = clock
        self._revision: int | None = None
        self._stored_changes = -1
        self._stored_seq = 0
        self._stored_ns = 0
        self._logger = structlog.get_logger(component="keeper")

    async def run(self) -> NoReturn:
        """Until cancelled. A store that fails is tried again: the log itself has everything for hours."""
        while True:
            wait_s = LOOK_EVERY_S
            if self._leadership.term is not None and self._due():
                try:
                    await self._store()
                except (Unavailable, WrongLastSequence, BadKeepsake, ValueError) as error:
                    self._logger.error("not kept", error=str(error), kept_to_seq=self._stored_seq)
                    wait_s = RETRY_EVERY_S
            await self._clock.sleep(wait_s)

    def _due(self) -> bool:
        if self._keepsake.changes != self._stored_changes:
            return True
        late = self._clock.monotonic_ns() - self._stored_ns >= REFRESH_NS
        return late and self._keepsake.seen_seq > self._stored_seq

    async def _store(self) -> None:
        changes, seen_seq = self._keepsake.changes, self._keepsake.seen_seq
        # Unknown until it has worked: a lost answer, or another leader's record, has to be read.
        revision, self._revision = self._revision, None
        if revision is None:
            found = await self._cell.read()
            revision = found[0] if found else 0
            if found and is_newer(found[1], self._log, seen_seq):
                self._logger.info("another leader has kept more", seen_seq=seen_seq)
                return
        self._revision = await self._cell.write(pack(self._keepsake, self._log), revision)
        self._stored_changes, self._stored_seq, self._stored_ns = changes, seen_seq, self._clock.monotonic_ns()
