"""Waits with a limit by the clock that was passed in, so that they mean the same in simulated time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.runtime.clock import Clock

T = TypeVar("T")


async def within(clock: Clock, limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. TimeoutError after `limit_s`, and then it is cancelled."""
    task = asyncio.ensure_future(work)
    limit = asyncio.ensure_future(clock.sleep(limit_s))
    try:
        await asyncio.wait([task, limit], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError(f"not done within {limit_s:g} s")
        return task.result()
    finally:
        limit.cancel()
        task.cancel()
