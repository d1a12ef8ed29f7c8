"""One process of one service: a source, a clock, connections, and the end of all of them at once."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from random import Random
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry

from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.clock import Ids
from shared.runtime.lease import CellLease
from shared.runtime.memory import MemoryCell, MemoryLog
from shared.runtime.service import Runtime
from shared.runtime.settings import ServiceSettings
from simulation.faults.distant import DistantCell, DistantLog
from simulation.faults.exchange import DistantBus, Exchange
from simulation.faults.network import Link, Weather

T = TypeVar("T")

BEGINNING_NS = 1_800_000_000 * 10**9
"""The wall clock at second 0 of every run."""

RUNS_IN: ContextVar["Process | None"] = ContextVar("process", default=None)
"""Whose code runs: None for clients and for the world itself."""


class Outside(NamedTuple):
    """What all processes have in common."""

    seed: str
    log: MemoryLog
    exchange: Exchange
    cells: dict[str, MemoryCell]
    subjects: Subjects
    weather: Weather

    def cell(self, name: str) -> MemoryCell:
        return self.cells.setdefault(name, MemoryCell())


class ProcessClock:
    """A `Clock` that goes wrong by `skew_ns`. `slowness` stretches what is slept: a straggler's steps."""

    def __init__(self, link: Link, skew_ns: int) -> None:
        self.slowness = 1.0
        self._link = link
        self._skew_ns = skew_ns

    def now_ns(self) -> int:
        return BEGINNING_NS + self.monotonic_ns() + self._skew_ns

    def monotonic_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * 1e9)

    async def sleep(self, seconds: float) -> None:
        await self._link.sleep(seconds * self.slowness)


class Process:
    """`name` is its role's. Each life of a role is another source. `loses_copies` is for engines that it makes."""

    def __init__(self, name: str, life: int, outside: Outside, skew_ns: int) -> None:
        self.name = name
        self.source = Source(f"{name}-{life}")
        self.context = copy_context()
        self.context.run(RUNS_IN.set, self)
        chance = Random(f"{outside.seed} {self.source}")
        self.link = Link(self.source, chance, outside.weather, self.context)
        self.clock = ProcessClock(self.link, skew_ns)
        self.engine_clock = ProcessClock(self.link, skew_ns)
        self.log = DistantLog(outside.log, self.link)
        self.metrics = CollectorRegistry()
        self.died = asyncio.Event()
        self.loses_copies = False
        self._outside = outside
        self._tasks: list[asyncio.Task[Any]] = []

    def runtime(self, settings: ServiceSettings) -> Runtime:
        """What a service stands on, in this process."""
        outside, link, clock = self._outside, self.link, self.clock
        return Runtime(
            settings=settings,
            clock=clock,
            ids=Ids(clock, Random(f"{outside.seed} ids of {self.source}")),
            log=self.log,
            keepsake=DistantCell(outside.cell("keepsake"), link),
            snapshots=lambda key: DistantCell(outside.cell(f"snapshots {key}"), link),
            bus=DistantBus(outside.exchange, link, clock),
            bulk=DistantBus(outside.exchange, link, clock),
            subjects=outside.subjects,
            source=self.source,
            metrics=self.metrics,
            lease=lambda role: CellLease(DistantCell(outside.cell(role), link), self.source, clock),
        )

    def run(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run something as this process."""
        task = asyncio.get_running_loop().create_task(work, context=self.context)
        self._tasks.append(task)
        return task

    def kill(self) -> None:
        """It is gone, with everything that it had in memory."""
        self.link.kill()
        self.died.set()
