"""An asyncio event loop in virtual time: nothing in it waits for the machine, so real shells run as fast as they compute.

Time stands still while anything is ready to run, and then jumps to the next timer. There are no sockets, threads or signals.
Everything that asyncio puts into sets hashes by the order of its creation instead of by its address: a run is a function of
the program alone, whatever ran in the process before.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

RESOLUTION_S = 1e-9

CANCEL_ROUNDS, CANCEL_TURNS = 3, 20
"""How often what is left at the end is cancelled, and the turns it has for its farewell. Chains of awaits are shorter."""


class StoodStill(Exception):
    """Nothing is ready and no timer is set: whoever waits would wait for ever."""


class _Future(asyncio.Future[Any]):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    def __init__(self, number: int, work: Any, loop: asyncio.AbstractEventLoop, context: Context | None) -> None:
        self._number = number
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """`time` is virtual seconds from 0. `settled` is called whenever an instant is over, before time goes on."""

    def __init__(self, settled: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = RESOLUTION_S
        self._selector = self
        self._settled = settled
        self._numbers = count(1)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def select(self, timeout_s: float | None) -> list[Any]:
        """The base class asks its selector for I/O, for up to the time that is left to the next timer. There is none, and
        the time passes at once. Errors: StoodStill."""
        if timeout_s is None:
            raise StoodStill(f"at {self._now_s:.3f} s")
        if timeout_s > 0:
            self._settled()
            self._now_s += timeout_s
        return []

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(next(self._numbers), self)

    def _make_task(
        self,
        _loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return _Task(next(self._numbers), work, self, context)

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list, "there is no I/O in virtual time"

    def _write_to_self(self) -> None:
        """The base class wakes its selector after a call from another thread, of which there is none."""


def run(main: Coroutine[Any, Any, T], settled: Callable[[], None] = lambda: None) -> T:
    """What `main` returns or raises, in a loop of its own. Every task that it leaves is cancelled."""
    loop = VirtualLoop(settled)
    try:
        return loop.run_until_complete(main)
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    """Ask them to end, again and again: one that was waiting for something may wait for something else then."""
    for _ in range(CANCEL_ROUNDS):
        for task in sorted(asyncio.all_tasks(loop), key=hash):
            task.cancel()
        loop.run_until_complete(_turns())


async def _turns() -> None:
    for _ in range(CANCEL_TURNS):
        await asyncio.sleep(0)
