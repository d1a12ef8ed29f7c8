import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cli.embedded.data_dir import AlreadyRunning, DataDir, RunningService, RunningSystem


def system(pid: int, log: Path) -> RunningSystem:
    services = {name: RunningService(url=f"http://127.0.0.1:1/{name}", log=log) for name in ("router", "ledger")}
    return RunningSystem(
        pid=pid,
        nats_url="nats://u:p@h:1",
        database_url="postgresql+asyncpg://u:p@h:1/d",
        operator_key_file=log.parent / "operator.key",
        tokenizer=False,
        services=services,
    )


def test_a_second_system_in_one_directory_is_refused_by_process_id(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from cli.embedded.data_dir import DataDir
with DataDir(Path({str(tmp_path)!r})).locked():
    print("held", flush=True)
    input()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(AlreadyRunning, match=rf"process {holder.pid} runs a system in {tmp_path}"),
        DataDir(tmp_path).locked(),
    ):
        pass
    holder.communicate("\n")
    with DataDir(tmp_path).locked():
        pass


def test_what_runs_is_announced_to_its_owner_only(tmp_path: Path) -> None:
    home = DataDir(tmp_path)
    assert home.running() is None
    announced = system(os.getpid(), home.logs / "router.log")
    home.announce(announced)
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600
    assert home.running() == announced
    assert announced.api_url == "http://127.0.0.1:1/router"
    home.withdraw()
    assert home.running() is None


def test_a_file_left_by_a_killed_system_does_not_count(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    home = DataDir(tmp_path)
    home.announce(system(gone.pid, home.logs / "router.log"))
    assert home.running() is None


def test_the_block_key_is_made_once_and_private(tmp_path: Path) -> None:
    file = DataDir(tmp_path).block_key_file()
    key = file.read_text()
    assert len(bytes.fromhex(key)) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert DataDir(tmp_path).block_key_file().read_text() == key
