"""Leadership by compare-and-set on one small record, the same over NATS and in memory.

The record names holder and term. The holder rewrites it every `RENEW_EVERY_S`; who sees it unchanged for `LEASE_S` on his
own monotonic clock takes it with the next term. So no two machines compare clocks, the term is written in the same step as
the holder, and a stopped holder is replaced within LEASE_S + 2 · ASK_EVERY_S = 4 s. A leader that was paused may still
believe in its lease for a moment: the fence (`fence.py`) makes that harmless.
"""

from typing import NamedTuple

import orjson
import structlog

from shared.runtime.clock import Clock
from shared.runtime.ports import Cell, Unavailable, WrongLastSequence

LEASE_S = 3.0
RENEW_EVERY_S = 1.0
ASK_EVERY_S = 0.5
"""How often a standby should call `acquire`."""

NOBODY = ""


class _Record(NamedTuple):
    holder: str
    term: int


class CellLease:
    """A `Lease` for `holder`, a name that no other process ever has (its source)."""

    def __init__(self, cell: Cell, holder: str, clock: Clock) -> None:
        self._cell = cell
        self._holder = holder
        self._clock = clock
        self._held: tuple[int, int] | None = None
        """(revision, term) while this process leads."""
        self._watched: tuple[int, int] | None = None
        """(revision of somebody else's record, monotonic time it was first seen at)."""
        self._logger = structlog.get_logger(component="lease")

    async def acquire(self) -> int | None:
        found = await self._cell.read()
        if found is None:
            return await self._take(revision=0, term=1)
        revision, record = found[0], _decode(found[1])
        if record.holder == self._holder:
            self._held = revision, record.term
            return record.term
        if record.holder == NOBODY or self._run_out(revision):
            return await self._take(revision, record.term + 1)
        return None

    async def renew(self) -> bool:
        if self._held is None:
            return False
        revision, term = self._held
        try:
            self._held = await self._cell.write(_encode(_Record(self._holder, term)), revision), term
        except WrongLastSequence:
            # Ours if it was our own last renewal, whose acknowledgement was lost.
            found = await self._cell.read()
            ours = found is not None and _decode(found[1]) == _Record(self._holder, term)
            self._held = (found[0], term) if found is not None and ours else None
        return self._held is not None

    async def release(self) -> None:
        if self._held is None:
            return
        (revision, term), self._held = self._held, None
        try:
            await self._cell.write(_encode(_Record(NOBODY, term)), revision)
        except WrongLastSequence:
            self._logger.info("the lease was gone before it was released")
        except Unavailable as error:
            self._logger.warning("lease not released; it runs out", error=str(error), after_s=LEASE_S)

    def _run_out(self, revision: int) -> bool:
        now_ns = self._clock.monotonic_ns()
        if self._watched is None or self._watched[0] != revision:
            self._watched = revision, now_ns
        return now_ns - self._watched[1] >= LEASE_S * 1e9

    async def _take(self, revision: int, term: int) -> int | None:
        try:
            self._held = await self._cell.write(_encode(_Record(self._holder, term)), revision), term
        except WrongLastSequence:
            return None
        return term


def _encode(record: _Record) -> bytes:
    return orjson.dumps(record._asdict())


def _decode(raw: bytes) -> _Record:
    return _Record(**orjson.loads(raw))
