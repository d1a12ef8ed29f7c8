"""A service as a real process, and a log to watch it by."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from cli.embedded.loopback import free_port
from cli.embedded.nats import EmbeddedNats
from cli.embedded.services import ServiceProcess
from shared.contracts.envelope import EventData, Stored
from shared.runtime.appending import NO_ORIGIN, append_once, last_sequence
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime, open_runtime
from shared.runtime.settings import ServiceSettings

WAIT_S = 45.0
"""Generous: a process starts in a second, but in fifteen next to ten others on two cores."""


class Replica(ServiceProcess):
    """`python -m services.<service>` as replica `instance` in pool `main`."""

    def __init__(self, service: str, nats: EmbeddedNats, directory: Path, instance: str = "1", **env: str) -> None:
        environment = {**os.environ, "VERTUMNUS_NATS_URL": nats.url, "VERTUMNUS_INSTANCE": instance, **env}
        log = directory / f"{service}-{instance}.log"
        super().__init__(service, f"services.{service}", env=environment, port=free_port(), log=log)

    @property
    def resident_mib(self) -> float:
        """Memory in use now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


class Witness:
    """Everything on the pool's log, as it comes, and a way to say something on it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.events: list[Stored] = []
        self._next_seq = 1
        self.projection: Projection[None] = Projection(
            runtime.log, [runtime.subjects.all_events], None, lambda _, stored: self.events.append(stored)
        )

    def all(self, kind: type[EventData]) -> list[EventData]:
        return [each.data for each in self.events if isinstance(each.data, kind)]

    async def tell(self, *facts: EventData, sender: str) -> None:
        """Append as `sender` (a source or a node), which has to be the only writer of its subject."""
        sealer = self.runtime.sealer(sender)
        sealer.next_seq, self._next_seq = self._next_seq, self._next_seq + len(facts)
        entries = [entry for _, entry in sealer.seal(facts, NO_ORIGIN)]
        expected = {
            subject: await last_sequence(self.runtime.log, subject, self.runtime.clock)
            for subject in {entry.subject for entry in entries}
        }
        await self.projection.folded(await append_once(self.runtime.log, entries, expected, self.runtime.clock))


@asynccontextmanager
async def witness(nats: EmbeddedNats) -> AsyncIterator[Witness]:
    """A witness of the pool `main`."""
    async with open_runtime(ServiceSettings(nats_url=nats.url), "witness") as runtime:
        seeing = Witness(runtime)
        await seeing.projection.start()
        yield seeing
        await seeing.projection.stop()


async def eventually(holds: Callable[[], object], within_s: float = WAIT_S) -> float:
    """Seconds until `holds` was true. AssertionError after `within_s`."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, f"not so within {within_s:g} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
