"""A server's process and what it leaves behind: real processes of a shell."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.worker.engine.sglang.process import ServerProcess
from shared.runtime.clock import SystemClock


class _Hasty(SystemClock):
    """Every sleep is a day of its own."""

    def __init__(self) -> None:
        self._days = 0

    def monotonic_ns(self) -> int:
        return self._days * 86_400 * 10**9

    async def sleep(self, seconds: float) -> None:
        self._days += 1
        await asyncio.sleep(0)


class Pids:
    """A file where a script writes process ids."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def written(self) -> list[int]:
        """Empty until the script has written its line."""
        text = self.path.read_text() if self.path.exists() else ""
        return [int(pid) for pid in text.split()] if text.endswith("\n") else []

    def running(self) -> bool:
        return any(_runs(pid) for pid in self.written())


@pytest.fixture
async def pids(tmp_path: Path) -> AsyncIterator[Pids]:
    """All of whose processes are gone when the test is."""
    pids = Pids(tmp_path / "pids")
    yield pids
    await _until(lambda: not pids.running())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def _until(holds: Callable[[], object]) -> None:
    for _ in range(6_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come about")


async def test_a_server_goes_with_everything_it_has_started(pids: Pids) -> None:
    server = ServerProcess(("sh", "-c", f"sleep 1000 & echo $! > {pids.path}; wait"), SystemClock())
    server.start()
    await _until(pids.written)
    assert server.ended is None
    await server.stop()
    await server.stop()


async def test_one_that_does_not_end_when_asked_is_killed(pids: Pids) -> None:
    """Time has passed at the first look."""
    server = ServerProcess(("sh", "-c", f"trap '' TERM; sleep 1000 & echo $! > {pids.path}; wait"), _Hasty())
    server.start()
    await _until(pids.written)
    await server.stop()


async def test_one_that_has_ended_keeps_its_number_until_its_children_are_gone(pids: Pids) -> None:
    server = ServerProcess(("sh", "-c", f"trap '' TERM; sleep 1000 & echo $! $$ > {pids.path}; exit 3"), SystemClock())
    server.start()
    await _until(lambda: server.ended)
    assert server.ended == "the server's process ended with 3"
    child, leader = pids.written()
    os.kill(leader, 0)  # nobody else can have this number
    assert os.getpgid(child) == leader
    await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(leader, 0)


async def test_a_signal_that_ended_it_is_named(pids: Pids) -> None:
    server = ServerProcess(("sh", "-c", f"echo $$ > {pids.path}; sleep 1000"), SystemClock())
    server.start()
    await _until(pids.written)
    os.kill(pids.written()[0], signal.SIGKILL)
    await _until(lambda: server.ended)
    assert server.ended == "the server's process ended by signal 9"
    await server.stop()


async def test_a_command_that_is_not_there_is_an_error_and_nothing_to_stop() -> None:
    server = ServerProcess(("/nonexistent/server",), SystemClock())
    with pytest.raises(OSError, match="nonexistent"):
        server.start()
    await server.stop()
