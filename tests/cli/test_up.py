"""`vertumnus up` with its real servers and schema; small HTTP servers stand in for the five services."""

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import nats
import pytest

from cli.embedded.data_dir import DataDir, RunningSystem
from cli.embedded.processes import is_running
from cli.embedded.system import SERVICES
from tests.support.up import Up


def up_with_stand_ins(directory: Path, *options: str) -> Up:
    """The data lies under `directory`, beside the modules that stand in for the services."""
    return Up(directory / "data", *options, python_path=directory)


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
    first = up_with_stand_ins(directory)
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

    second = up_with_stand_ins(directory)
    second.ready()
    assert await read_from_both(running(directory)) == (1, 1)
    assert second.end()[0] == 0


def test_a_second_system_on_the_same_data_is_refused_by_process_id(directory: Path) -> None:
    first = up_with_stand_ins(directory)
    first.ready()
    second = up_with_stand_ins(directory)
    said = second.failed()
    assert second.process.returncode == 1
    assert f"process {first.process.pid} runs a system in" in said
    assert first.end()[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_a_killed_supervisor_takes_everything_with_it(directory: Path) -> None:
    up = up_with_stand_ins(directory)
    up.ready()
    children = up.children()
    assert len(children) == len(SERVICES) + 2
    up.end(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = up_with_stand_ins(directory)
    again.ready()
    assert again.end()[0] == 0


def test_a_service_that_cannot_start_ends_the_command(directory: Path) -> None:
    (directory / "services" / "worker.py").write_text("raise SystemExit('no memory for the ranks')")
    up = up_with_stand_ins(directory)
    said = up.failed()
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
    up = up_with_stand_ins(directory, *options)
    said = up.failed()
    assert up.process.returncode == 2
    assert complaint in " ".join(said.replace("│", " ").split())
