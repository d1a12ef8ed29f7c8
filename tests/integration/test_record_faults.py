"""The commands that read the record, when the world ends in the middle of them; and a disk that is full under the ledger."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from cli.embedded.nats import EmbeddedNats
from cli.embedded.postgres import EmbeddedPostgres
from services.ledger.database import driver_url
from shared.contracts.events import RequestReceived
from tests.integration.ledger_rig import LedgerRig, until_reason
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import World
from tests.services.ledger.record_writer import RecordWriter
from tests.support.replica import eventually

LIMIT_S = 120
"""For a process that does not end at all."""

FILE_BYTES_MAX = 4_096
"""What a full disk takes of an export."""

DISK_BYTES = "size=4m"


@pytest.fixture
def small_disk(own_postgres: EmbeddedPostgres) -> Iterator[Path]:
    """A file system of four megabytes that belongs to the server."""
    directory = own_postgres.directory.parent / "disk"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", DISK_BYTES, "tmpfs", directory], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        owner = own_postgres.directory.stat()
        os.chown(directory, owner.st_uid, owner.st_gid)
        yield directory
    finally:
        # Its server still has files there.
        subprocess.run(["umount", "--lazy", directory], check=True)


async def recorded(url: str) -> World:
    told = World(4)
    told.run(400)
    writing = RecordWriter(url)
    await writing.restart()
    await writing.write(arrivals(told.log))
    await writing.close()
    return told


def vertumnus(url: str, *arguments: str, before: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "from cli.main import app; app()", *arguments],
        env={**os.environ, "VERTUMNUS_DATABASE_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def left_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def until_waiting(url: str, processes: int = 1) -> None:
    """Until so many wait for a lock of the record."""
    asking = await asyncpg.connect(driver_url(url))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    for _ in range(LIMIT_S * 10):
        if await asking.fetchval(waiting) >= processes:
            await asking.close()
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never came to the locked table")


async def test_an_export_that_is_killed_leaves_nothing_that_looks_whole(
    record_url: str, elsewhere: str, tmp_path: Path
) -> None:
    told = await recorded(record_url)
    file = tmp_path / "incident"
    holder = await asyncpg.connect(driver_url(record_url))
    async with holder.transaction():
        await holder.execute("LOCK TABLE repeats IN ACCESS EXCLUSIVE MODE")
        killed = vertumnus(record_url, "ledger", "export", str(file))
        await until_waiting(record_url)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=LIMIT_S)
    await holder.close()
    half = tmp_path / "incident.partial"
    assert not file.exists()
    assert half.exists()
    refused = vertumnus(elsewhere, "ledger", "import", str(half))
    complained = refused.communicate(timeout=LIMIT_S)[1]
    assert "bundle" in complained
    assert "Traceback" not in complained
    assert refused.returncode == 1
    again = vertumnus(record_url, "ledger", "export", str(file))
    said, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0
    assert f"{len(told.log):,} events" in said.replace("\n", "")
    assert not half.exists()


async def test_an_export_onto_a_full_disk_says_so_and_leaves_no_file(record_url: str, tmp_path: Path) -> None:
    await recorded(record_url)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))

    refused = vertumnus(record_url, "ledger", "export", str(tmp_path / "incident"), before=fill)
    _, said = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 1
    assert "File too large" in said
    assert "Traceback" not in said
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("command", ["verify", "verify --jobs 3", "explain", "replay --at 100"])
async def test_postgres_dies_in_the_middle_of_a_command(
    own_postgres: EmbeddedPostgres, own_record_url: str, command: str
) -> None:
    url = own_record_url
    told = await recorded(url)
    request = next(each.data.request for each in told.log if isinstance(each.data, RequestReceived))
    holder = await asyncpg.connect(driver_url(url))
    held = holder.transaction()
    await held.start()
    await holder.execute("LOCK TABLE block_events IN ACCESS EXCLUSIVE MODE")
    asking = vertumnus(url, *command.split(), *([request] if command == "explain" else []))
    await until_waiting(url, 3 if "jobs" in command else 1)
    own_postgres.stop(kill=True)
    holder.terminate()
    said, complained = await asyncio.to_thread(asking.communicate, timeout=LIMIT_S)
    assert asking.returncode == 1
    assert said == ""
    assert complained.count("\n") == 1, complained
    own_postgres.start()
    after = vertumnus(url, *command.split(), *([request] if command == "explain" else []))
    assert (await asyncio.to_thread(after.communicate, timeout=LIMIT_S))[1] == ""
    assert after.returncode == 0, "nothing is left behind that would be in the way"


async def test_a_full_disk_stops_the_copy_and_loses_nothing(
    nats_server: EmbeddedNats, own_record_url: str, small_disk: Path, tmp_path: Path
) -> None:
    url = own_record_url
    owner = await asyncpg.connect(driver_url(url))
    await owner.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    await owner.execute("ALTER TABLE decisions SET TABLESPACE small")
    (small_disk / "filler").write_bytes(bytes(3 << 20))
    rig = LedgerRig(nats_server, url, tmp_path)
    ledger = rig.ledger()
    ledger.start()
    try:
        async with rig.runtime() as runtime:
            async with rig.load(runtime) as load:
                assert "No space left on device" in await until_reason(ledger, "DiskFullError")
                copied = await rig.copied_seq()
                await eventually(lambda: load.last_seq > copied + 200)
            assert await rig.copied_seq() == copied
            (small_disk / "filler").unlink()
            await owner.execute("ALTER TABLE decisions SET TABLESPACE pg_default")
            await rig.until_copied(load.last_seq)
            await until_reason(ledger, None)
            assert ledger.exit_status() is None, "the process outlived all of it"
        found = await rig.audited()
        assert found.events == load.events
        assert found.by_table["repeats"] == 0
        await owner.execute("DROP TABLESPACE small")
    finally:
        rig.stop()
        await owner.close()
