"""Step boundaries: who runs a step, and how all of a node's workers are parked between two of them."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from shared.contracts.ids import WorkerId


class Gate:
    """Every engine step runs inside `step`. While the gate is closed, none begins."""

    def __init__(self) -> None:
        self._stepping: set[WorkerId] = set()
        self._closers = 0
        self._open = asyncio.Event()
        self._open.set()
        self._boundary = asyncio.Event()

    @asynccontextmanager
    async def step(self, worker: WorkerId) -> AsyncIterator[None]:
        """Waits while the gate is closed. One step per worker at a time is the caller's rule."""
        await self._open.wait()
        self._stepping.add(worker)
        try:
            yield
        finally:
            self._stepping.remove(worker)
            self._boundary.set()

    async def idle(self, workers: Collection[WorkerId]) -> None:
        """Returns when none of `workers` is in a step. They stay idle only if nothing may start one."""
        while not self._stepping.isdisjoint(workers):
            self._boundary.clear()
            await self._boundary.wait()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """No step begins inside. Several may close the gate at once; it opens when the last of them leaves."""
        self._closers += 1
        self._open.clear()
        try:
            yield
        finally:
            self._closers -= 1
            if not self._closers:
                self._open.set()

    async def parked(self) -> None:
        """Returns when no step runs. Only while the gate is closed does that stay so."""
        await self.idle(tuple(self._stepping))
