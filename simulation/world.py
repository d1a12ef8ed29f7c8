"""Services in one process: one in-memory log, one clock that stands still until told, and a reader that shows each event."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any

from shared.contracts.envelope import EventData, Stored
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.fence import Fence
from shared.runtime.memory import ManualClock, MemoryLog
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection

Say = Callable[[Sequence[EventData]], Awaitable[object]]
"""Store facts. When it returns, everybody has folded them."""


class World:
    """Everybody who joins folds everything that anybody says."""

    def __init__(self) -> None:
        self.clock, self.log, self.subjects = ManualClock(), MemoryLog(), Subjects("main")
        self._ids = Ids(self.clock, Random(1))
        self._began_ns = self.clock.now_ns()

    async def join(self, name: str, state: Any, evolve: Callable[[Any, Stored], None], leads: str | None = None) -> Say:
        """How a service writes: the leader of a subject commits through its fence, others record facts of their own."""
        projection = Projection(self.log, [self.subjects.all_events], state, evolve)
        sealer = Sealer(Identity("main", Source(name), name), self.subjects, self.clock, self._ids)
        await projection.start()
        if leads:
            return Fence(projection, sealer, leads, self.clock).commit
        outbox = Outbox(projection, sealer, self.clock)
        await outbox.start()

        async def record(facts: Sequence[EventData]) -> None:
            await outbox.stored(outbox.record(facts)[-1])

        return record

    async def show(self, lines: Mapping[str, str]) -> None:
        """Print each event from now on; `lines` says how, by type and with the names of its fields."""

        def read(_: None, stored: Stored) -> None:
            event = stored.event
            at_s = (event.time_ns - self._began_ns) / 1e9
            what = lines[event.type].format_map(dict(event.data))
            print(f"{stored.stream_seq:3} {at_s:7.3f} s  {event.source:<10}  {event.type:<23}  {what}")  # noqa: T201

        await Projection(self.log, [self.subjects.all_events], None, read).start()
