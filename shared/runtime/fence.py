"""Decisions that only a leader may take (controller, cache manager).

`commit` appends behind the last event of the fenced subject that this process has folded. If anybody has decided since, the
append fails and nothing happened: the state is only ever changed by what the log brings back. Lease and term keep a second
leader rare; this keeps it harmless.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from shared.contracts.envelope import EventData
from shared.runtime.appending import NO_ORIGIN, Fenced, Origin, Sealer, append_once
from shared.runtime.clock import Clock
from shared.runtime.projection import Projection


class Fence:
    """One per deciding process; `subject` is `….control` or `….cache-control`."""

    def __init__(self, projection: Projection[Any], sealer: Sealer, subject: str, clock: Clock) -> None:
        self._projection = projection
        self._sealer = sealer
        self._subject = subject
        self._clock = clock
        self._turn = asyncio.Lock()

    async def commit(self, decisions: Sequence[EventData], origin: Origin = NO_ORIGIN) -> int:
        """Store `decisions` and fold them; returns the sequence of the last. Waits while the log is away.

        Decide from the state and call this without awaiting anything in between: the fence covers what was folded at the
        call. Errors: Fenced, and then nothing was stored and no number used; LogLost; BadEvent.
        """
        expected = {self._subject: self._projection.last_on.get(self._subject, 0)}
        assert not self._turn.locked(), "one decision at a time: await the last commit before you decide again"
        assert self._projection.own_recorded is None, "a process has an outbox or a fence: either records its events"
        async with self._turn:
            entries = [entry for _, entry in self._sealer.seal(decisions, origin)]
            assert all(entry.subject == self._subject for entry in entries), "a commit is to the fenced subject alone"
            last_number = self._sealer.next_seq - 1
            try:
                last = await append_once(self._projection.log, entries, expected, self._clock)
            except Fenced as fenced:
                # Ours may have been stored before theirs, its acknowledgement lost. The fold knows.
                await self._projection.folded(fenced.seq)
                folded = self._projection.last_of(self._sealer.identity.source)
                self._sealer.next_seq = folded.source_seq + 1
                if folded.source_seq < last_number:
                    raise
                last = folded.stream_seq
            await self._projection.folded(last)
            return last
