"""Work on a state as it is now, while the process goes on: done by a copy of the process, which then ends.

The copy shares memory with its origin until either changes a page, as `fork` has it. So it needs no locks, its origin stands
still only while the tables of its pages are copied, and what it computes comes back through a pipe no faster than it is read.
It runs plain code on what is in memory: its connections are closed first.
"""

import asyncio
import gc
import os
import signal
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NoReturn, Protocol

READ_BYTES = 2**18
LOOK_EVERY_S = 0.02
"""Whether a copy that has said everything has ended."""

Work = Callable[[], Iterator[bytes]]


class Told(Protocol):
    """What `work` yields. Close it, read or not."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Errors: CopyFailed."""

    async def aclose(self) -> None: ...


Elsewhere = Callable[[Work], Told]
"""Does the work on everything as it is at the call, while that goes on to change."""


class CopyFailed(Exception):
    """The copy of the process has ended otherwise than it should; its traceback is on stderr."""


class ProcessCopy:
    """An `Elsewhere`. Errors: OSError without memory or processes for a copy."""

    def __init__(self, work: Work) -> None:
        reading, writing = os.pipe()
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        self._transport: asyncio.BaseTransport | None = None
        self._has_ended = False
        try:
            self._child = os.fork()
            if self._child == 0:
                _say_and_end(work, writing)
        except OSError:
            self._pipe.close()
            raise
        finally:
            os.close(writing)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._pipe)
        while piece := await reader.read(READ_BYTES):
            yield piece
        # Nothing else tells that a process has ended.
        while (status := self._status(os.WNOHANG)) is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        if status:
            raise CopyFailed(f"process {self._child} ended with {os.waitstatus_to_exitcode(status)}")

    async def aclose(self) -> None:
        """End the copy, if it has not ended."""
        (self._transport or self._pipe).close()
        if not self._has_ended:
            os.kill(self._child, signal.SIGKILL)
            self._status(0)

    def _status(self, options: int) -> int | None:
        """What it has ended with; None while it runs."""
        ended, status = os.waitpid(self._child, options)
        self._has_ended = bool(ended)
        return status if ended else None


def _say_and_end(work: Work, writing: int) -> NoReturn:
    """Never returns into what the origin was doing."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        # Ports and connections are the origin's: they must end with it.
        os.closerange(3, writing)
        os.closerange(writing + 1, os.sysconf("SC_OPEN_MAX"))
        gc.disable()
        for piece in work():
            told = memoryview(piece)
            while told:
                told = told[os.write(writing, told) :]
        status = 0
    except BrokenPipeError:
        pass  # the origin has ended, or wants it no longer
    except BaseException:  # noqa: BLE001 - whatever it is, the copy must not go on with its origin's work
        traceback.print_exc()
    finally:
        os._exit(status)
