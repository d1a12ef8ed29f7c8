"""Where a role's processes run one after another, and what is wrong there now. A fault outlives the process that it met."""

import asyncio

from simulation.faults.network import Weather
from simulation.faults.process import Process
from simulation.faults.roles import Service


class Place:
    """`process` is None between two lives, `service` also while one starts."""

    def __init__(self, name: str, skew_ns: int) -> None:
        self.name = name
        self.skew_ns = skew_ns
        self.process: Process | None = None
        self.service: Service | None = None
        self.stop_ordered = asyncio.Event()
        self.weather = Weather()
        self._held_down = 0
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._cuts = 0
        self._slowness = 1.0
        self._loses_copies = False

    @property
    def lives(self) -> bool:
        return self.process is not None and not self.process.link.dead

    # --- lives

    async def startable(self) -> None:
        """Returns when nothing keeps the role down."""
        await self._may_start.wait()

    def begin(self, process: Process) -> Process:
        """The next life."""
        self.process = process
        self.stop_ordered.clear()
        process.link.own = self.weather
        process.engine_clock.slowness = self._slowness
        process.loses_copies = self._loses_copies
        for _ in range(self._cuts):
            process.link.cut()
        return process

    def end(self) -> None:
        """Whatever is left of the process is gone."""
        if self.process is not None:
            self.process.kill()
        self.process = self.service = None

    # --- faults

    def take_down(self, *, orderly: bool) -> None:
        """By SIGTERM or SIGKILL, until `bring_up`."""
        self._held_down += 1
        self._may_start.clear()
        if self.process is not None and orderly and self.service is not None:
            self.stop_ordered.set()
        elif self.process is not None:
            self.process.kill()

    def bring_up(self) -> None:
        self._held_down -= 1
        if not self._held_down:
            self._may_start.set()

    def cut(self) -> None:
        self._cuts += 1
        if self.process is not None:
            self.process.link.cut()

    def mend(self) -> None:
        self._cuts -= 1
        if self.process is not None:
            self.process.link.mend()

    def slow_down(self, factor: float) -> None:
        """Every step of the engine takes `factor` times as long."""
        self._slowness = factor
        if self.process is not None:
            self.process.engine_clock.slowness = factor

    def lose_copies(self, *, lost: bool) -> None:
        """Of every copy to the node the second half does not come: its source is gone."""
        self._loses_copies = lost
        if self.process is not None:
            self.process.loses_copies = lost
        if self.service is not None:
            for engine in self.service.engines:
                engine.lose_copies(lost)

    def kill_engine(self) -> None:
        """The node's ranks die; its agent lives on."""
        if self.process is not None and self.service is not None and self.service.engines:
            self.process.run(self.service.engines[-1].close())
