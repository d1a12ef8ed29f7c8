"""Where one half plays: its system, in a fresh directory, tended as `vertumnus up` tends one."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cli.demo.halves import Half
from cli.embedded.data_dir import DataDir, RunningSystem
from cli.embedded.postgres import EmbeddedPostgres
from cli.embedded.supervisor import POLL_S, Interrupted, stop_on_signals
from cli.embedded.system import EmbeddedSystem
from cli.settings import CommandSettings

T = TypeVar("T")


class Stage:
    """`running` for the system, `wait` for work on it. `say` and `interrupted` are those of the supervisor."""

    def __init__(self, half: Half, home: DataDir, say: Callable[[str], None], interrupted: threading.Event) -> None:
        self._home = home
        self._interrupted = interrupted
        # Never the servers that the environment names: what is on them belongs to somebody.
        own_servers = CommandSettings(nats_url=None, database_url=None)
        self._embedded = EmbeddedSystem(home, half.choices, own_servers, say, interrupted)

    @contextmanager
    def running(self) -> Iterator[RunningSystem]:
        """The system, with nothing in it. Errors: AlreadyRunning, StartFailed, Interrupted, OSError."""
        with self._home.locked():
            self._clear()
            stop_on_signals(self._interrupted, self._embedded.supervisor)
            with self._embedded.running() as system:
                yield system

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; a service that crashes meanwhile is started again.

        Errors: Interrupted, GaveUp, and those of `work`, which is cancelled by the other two.
        """
        return asyncio.run(self._tended(work))

    async def _tended(self, work: Coroutine[Any, Any, T]) -> T:
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                if self._interrupted.is_set():
                    raise Interrupted
                # In this thread: what it starts lives as long as the thread does (`cli.embedded.processes.spawn`).
                self._embedded.supervisor.tend()
                await asyncio.wait({working}, timeout=POLL_S)
            return working.result()
        finally:
            if working.cancel():
                await asyncio.wait({working})

    def _clear(self) -> None:
        """Remove what the last demo left. Errors: OSError."""
        self._home.clear()
        elsewhere = EmbeddedPostgres(self._home.postgres).directory
        if elsewhere.exists():
            shutil.rmtree(elsewhere)
