"""`vertumnus up` with its real servers and schema; small HTTP servers stand in for the five services."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import nats
import pytest

from cli.embedded.data_dir import DataDir, RunningSystem
from cli.embedded.processes import is_running
from cli.embedded.system import SERVICES

LIMIT_S = 60


class Up:
    """One run of the command on `directory`."""

    def __init__(self, directory: Path, *options: str) -> None:
        arguments = ["up", "--json", "--data-dir", str(directory / "data"), "--engine", "modelled", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from cli.main import app; app()", *arguments],
            env={**os.environ, "PYTHONPATH": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """Wait until everything runs; what the command printed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        printed: dict[str, Any] = json.loads(line)
        return printed

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; the exit status and what was said on stderr."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode, said


@pytest.fixture
def directory(stand_in: str) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    path.chmod(0o711)
    services = path / "services"
    services.mkdir()
    (services / "__init__.py").touch()
    for name in SERVICES:
        (services / f"{name}.py").write_text(stand_in)
    yield path
    shutil.rmtree(path)


def running(directory: Path) -> RunningSystem:
    system = DataDir(directory / "data").running()
    assert system is not None
    return system


async def write_to_both(system: RunningSystem) -> None:
    client = await nats.connect(system.nats_url)
    await client.jetstream().add_stream(name="KEPT", subjects=["kept"])
    await client.jetstream().publish("kept", b"")
    await client.close()
    connection = await asyncpg.connect(system.database_url.replace("+asyncpg", ""))
    await connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
    await connection.close()


async def read_from_both(system: RunningSystem) -> tuple[int, int]:
    client = await nats.connect(system.nats_url)
    messages = (await client.jetstream().stream_info("KEPT")).state.messages
    await client.close()
    connection = await asyncpg.connect(system.database_url.replace("+asyncpg", ""))
    rows = await connection.fetchval("SELECT count(*) FROM kept")
    await connection.close()
    return messages, rows


async def test_a_second_start_resumes_from_the_data_of_the_first(directory: Path) -> None:
    first = Up(directory)
    printed = first.ready()
    assert printed["pid"] == first.process.pid
    assert set(printed["services"]) == set(SERVICES)
    assert "postgresql" not in json.dumps(printed), "credentials are not for printing"
    await write_to_both(running(directory))
    status, said = first.end(signal.SIGTERM)
    assert status == 0, said
    assert said.splitlines()[-7:] == [f"{name} has stopped" for name in (*reversed(SERVICES), "postgres", "nats")], (
        "what was started last stops first"
    )
    assert DataDir(directory / "data").running() is None

    second = Up(directory)
    second.ready()
    assert await read_from_both(running(directory)) == (1, 1)
    assert second.end(signal.SIGINT)[0] == 0


def test_a_second_system_on_the_same_data_is_refused_by_process_id(directory: Path) -> None:
    first = Up(directory)
    first.ready()
    second = Up(directory)
    said = second.process.communicate(timeout=LIMIT_S)[1]
    assert second.process.returncode == 1
    assert f"process {first.process.pid} runs a system in" in said
    assert first.end(signal.SIGINT)[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_a_killed_supervisor_takes_everything_with_it(directory: Path) -> None:
    up = Up(directory)
    up.ready()
    children = Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()
    assert len(children) == len(SERVICES) + 2
    up.process.kill()
    up.process.communicate()
    deadline = time.monotonic() + 10
    while any(is_running(int(child)) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = Up(directory)
    again.ready()
    assert again.end(signal.SIGINT)[0] == 0


def test_a_service_that_cannot_start_ends_the_command(directory: Path) -> None:
    (directory / "services" / "worker.py").write_text("raise SystemExit('no memory for the ranks')")
    up = Up(directory)
    said = up.process.communicate(timeout=LIMIT_S)[1]
    assert up.process.returncode == 1
    assert "worker ended with status 1" in said
    assert "no memory for the ranks" in said
    assert "nats has stopped" in said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--composition", "1,2"], "degree-2 worker cannot start at rank 1"),
        (["--engine", "torch"], "holds no model"),
        (["--router-port", "70000"], "65535"),
    ],
)
def test_bad_options_are_named(directory: Path, options: list[str], complaint: str) -> None:
    up = Up(directory, *options)
    said = up.process.communicate(timeout=LIMIT_S)[1]
    assert up.process.returncode == 2
    assert complaint in " ".join(said.replace("│", " ").split())
