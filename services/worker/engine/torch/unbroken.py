"""Work that ranks and index do together: once begun, it is done to its end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work` in a task of its own: a caller that leaves must not leave ranks and index at odds."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone
    return await asyncio.shield(task)
