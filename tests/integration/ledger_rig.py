"""A ledger as a real process between a real NATS and a real Postgres, under load, and ways to break each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import asyncpg
import httpx

from bench.ledger_publisher import Publisher, pieces
from bench.ledger_traffic import Traffic
from cli.embedded.nats import EmbeddedNats
from services.ledger.audit import Audit, audit
from services.ledger.database import driver_url
from shared.runtime.service import Runtime, open_runtime
from shared.runtime.settings import ServiceSettings
from tests.support.replica import Replica

WAIT_S = 60.0
"""Generous: tests share two cores with others."""

PAUSE_S = 0.2
"""Between two appends of 100 events: five hundred events a second at most, so that the processes can share a core."""


class LedgerRig:
    """A stream, a migrated database at `url`, and the ledgers that were asked for."""

    def __init__(self, nats: EmbeddedNats, url: str, logs: Path) -> None:
        self.nats = nats
        self.url = url
        self._logs = logs
        self._ledgers: list[Replica] = []

    def ledger(self, instance: str = "1", **env: str) -> Replica:
        """A ledger, not started."""
        made = Replica("ledger", self.nats, self._logs, instance, VERTUMNUS_DATABASE_URL=self.url, **env)
        self._ledgers.append(made)
        return made

    def stop(self) -> None:
        for each in self._ledgers:
            each.stop(kill=True)

    @contextlib.asynccontextmanager
    async def runtime(self) -> AsyncIterator[Runtime]:
        async with open_runtime(ServiceSettings(nats_url=self.nats.url, log_level="error"), "load") as runtime:
            yield runtime

    @contextlib.asynccontextmanager
    async def load(self, runtime: Runtime, seed: int = 1, *, pool_starts: bool = True) -> AsyncIterator[Publisher]:
        """Traffic while the block runs; the request under way is told to its end."""
        publisher, stopping = Publisher(runtime, f"load{seed}"), asyncio.Event()

        async def publish() -> None:
            for piece in islice(pieces(Traffic(seed, f"r{seed}"), 1_000_000), 0 if pool_starts else 1, None):
                await publisher.append(publisher.sealed(piece))
                if stopping.is_set() and piece[-1].fact.TYPE.startswith(("request-completed", "request-c", "window")):
                    return
                await asyncio.sleep(PAUSE_S)

        publishing = asyncio.create_task(publish())
        try:
            yield publisher
            stopping.set()
            await publishing
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    async def copied_seq(self, log_number: int = 1) -> int:
        """How far a log has been copied; -1 while there is no such log, or Postgres is away."""
        question = "SELECT stream_seq FROM checkpoints JOIN logs USING (log) WHERE number = $1"
        try:
            connection = await asyncpg.connect(driver_url(self.url), timeout=2)
        except (OSError, asyncpg.PostgresError, TimeoutError):
            return -1
        try:
            copied: int | None = await connection.fetchval(question, log_number)
        finally:
            await connection.close()
        return -1 if copied is None else copied

    async def until_copied(self, seq: int, log_number: int = 1) -> None:
        """AssertionError if the copy stands still for `WAIT_S` before it has got as far."""
        reached, deadline = -1, time.monotonic() + WAIT_S
        while reached < seq:
            assert time.monotonic() < deadline, f"log {log_number} is copied to {reached}, not to {seq}"
            before, reached = reached, await self.copied_seq(log_number)
            if reached > before:
                deadline = time.monotonic() + WAIT_S
            await asyncio.sleep(0.05)

    async def audited(self, *, settled: bool = True) -> Audit:
        """The audit of the record; every violation is a failure."""
        found = await audit(self.url, settled=settled)
        assert found.clean, found.violations
        return found


async def reason(ledger: Replica) -> str | None:
    """What `/readyz` says: None for ready, else why not."""
    try:
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{ledger.url}/readyz", timeout=5)
    except httpx.TransportError:
        return "no answer"
    return None if answer.status_code == 200 else answer.text.strip()


async def until_reason(ledger: Replica, part: str | None) -> str:
    """Wait until `/readyz` is ready (`part` None) or says `part`; what it said."""
    deadline = time.monotonic() + WAIT_S
    while True:
        said = await reason(ledger)
        if said is None if part is None else (said is not None and part in said):
            return said or ""
        assert time.monotonic() < deadline, f"wanted {part!r}, /readyz says {said!r}"
        await asyncio.sleep(0.05)


async def metric(ledger: Replica, name: str) -> float:
    """One sample of `/metrics`."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{ledger.url}/metrics", timeout=5)).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))
