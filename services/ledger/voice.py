"""What the ledger itself says on the log. One thing after the other, whoever in the process says it."""

import asyncio

from services.ledger.records import Arrival, Record, record
from shared.contracts.envelope import Channel, EventData
from shared.runtime.appending import NO_ORIGIN, append_once, last_sequence
from shared.runtime.service import Runtime


class Voice:
    """One per process: its events are numbered here."""

    def __init__(self, runtime: Runtime) -> None:
        self._log = runtime.log
        self._clock = runtime.clock
        self._sealer = runtime.sealer(runtime.source)
        self._subject = runtime.subjects.event(Channel.LEDGER, runtime.source)
        self._turn = asyncio.Lock()

    async def say(self, fact: EventData) -> int:
        """Store `fact`; its sequence. Waits while the log is away.

        Errors: Fenced if another ledger speaks; LogLost; BadEvent.
        """
        async with self._turn:
            expected = {self._subject: await last_sequence(self._log, self._subject, self._clock)}
            entries = [entry for _, entry in self._sealer.seal([fact], NO_ORIGIN)]
            return await append_once(self._log, entries, expected, self._clock)

    async def last_said(self) -> Record | None:
        """The last thing that any ledger has said on this log. Errors: Unavailable; LogLost."""
        found = await self._log.last_on(self._subject)
        return record(Arrival(*found)) if found else None
