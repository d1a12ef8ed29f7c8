"""Both worlds behind the ports: in memory, and on a real NATS server."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from cli.embedded.nats import EmbeddedNats
from shared.contracts.subjects import Subjects
from shared.runtime.clock import Ids, SystemClock
from shared.runtime.lease import CellLease
from shared.runtime.memory import ManualClock, MemoryBus, MemoryCell, MemoryLog
from shared.runtime.nats_bus import NatsBus
from shared.runtime.nats_cell import LEASES, NatsCell, open_buckets
from shared.runtime.nats_link import NatsLink, connect
from shared.runtime.nats_log import NatsLog, open_log
from shared.runtime.ports import Bus, EventLog
from shared.runtime.settings import ServiceSettings
from simulation.faults.distant import DistantCell, DistantLog
from simulation.faults.exchange import DistantBus, Exchange
from simulation.faults.network import Link, Weather
from tests.runtime.proxy import Proxy

SUBJECTS = Subjects("test")
CLOCK = SystemClock()


class World(NamedTuple):
    """One process's view of the outside world; `second` is another process's."""

    log: EventLog
    bus: Bus
    second_bus: Bus
    leases: tuple[CellLease, CellLease]
    lease_clock: ManualClock
    """What both look at."""


class NatsClient:
    """Connections of one process to a test's NATS server."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.ids = Ids(CLOCK, random.Random(url))
        self._stack = stack

    @asynccontextmanager
    async def proxied(self) -> AsyncIterator[tuple[Proxy, "NatsClient"]]:
        """Another process, whose connections go through a proxy."""
        port = urlsplit(self.url).port
        assert port is not None
        async with Proxy(port) as proxy, AsyncExitStack() as stack:
            yield proxy, NatsClient(self.url.replace(f":{port}", f":{proxy.port}"), stack)

    async def link(self) -> NatsLink:
        link = await connect(self.url, "test", limit_s=5)
        self._stack.push_async_callback(link.close)
        return link

    async def bus(self) -> NatsBus:
        bus = NatsBus(await self.link())
        self._stack.push_async_callback(bus.close)
        return bus

    async def log(self) -> NatsLog:
        settings = ServiceSettings(nats_url=self.url, pool="test")
        return await open_log(await self.link(), SUBJECTS, settings, CLOCK, self.ids)


@pytest.fixture
async def nats(nats_server: EmbeddedNats) -> AsyncIterator[NatsClient]:
    async with AsyncExitStack() as stack:
        yield NatsClient(nats_server.url, stack)


@pytest.fixture(params=["memory", "distant", "nats"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The same tests hold both implementations to the contract of the ports."""
    clock = ManualClock()
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            bus, cell = MemoryBus(CLOCK), MemoryCell()
            stack.push_async_callback(bus.close)
            leases = CellLease(cell, "a", clock), CellLease(cell, "b", clock)
            yield World(MemoryLog(), bus, bus, leases, clock)
            return
        if request.param == "distant":
            yield _distant(clock)
            return
        client = NatsClient(request.getfixturevalue("nats_server").url, stack)
        link = await client.link()
        await open_buckets(link, SUBJECTS, replicas=1, clock=CLOCK)
        cells = [NatsCell(each, SUBJECTS, LEASES, "leader") for each in (link, await client.link())]
        yield World(
            await client.log(),
            await client.bus(),
            await client.bus(),
            (CellLease(cells[0], "a", clock), CellLease(cells[1], "b", clock)),
            clock,
        )


def _distant(lease_clock: ManualClock) -> World:
    """What the fault simulation puts in front of the in-memory world, while nothing fails."""
    log, exchange, cell, weather = MemoryLog(), Exchange(), MemoryCell(), Weather()
    links = [Link(name, random.Random(name), weather, copy_context()) for name in "ab"]
    buses = [DistantBus(exchange, link, CLOCK) for link in links]
    leases = [CellLease(DistantCell(cell, link), link.name, lease_clock) for link in links]
    return World(DistantLog(log, links[0]), *buses, (leases[0], leases[1]), lease_clock)
