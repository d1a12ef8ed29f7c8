"""A task that works until it is told to stop: what a service's shell runs beside its HTTP server."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """One task. It ends by `stop` or by a failure, never because it is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin. Once."""
        assert self._task is None, f"{self._name} was started before"
        self._task = asyncio.create_task(work, name=self._name)

    async def stop(self) -> None:
        """End it, if it has begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def failed(self) -> Exception:
        """Returns when it can go on no longer: the process must end."""
        assert self._task is not None, f"{self._name}: failed() before start()"
        await asyncio.wait([self._task])
        return self._task.exception() or RuntimeError(f"{self._name} ended")  # type: ignore[return-value]
