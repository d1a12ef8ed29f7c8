import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.embedded.processes import StartFailed, is_running, rotate_log, run_to_end, spawn, stop

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"{text!r} never appeared in {log.read_text()!r}"
        time.sleep(0.01)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def test_a_process_that_ignores_the_request_is_ended(tmp_path: Path) -> None:
    process = spawn([sys.executable, "-c", STUBBORN], log=tmp_path / "log")
    wait_for(tmp_path / "log", "up")
    assert stop(process, limit_s=0.2) is False
    assert process.returncode == -signal.SIGKILL


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    process = spawn([sys.executable, "-c", code], log=tmp_path / "log")
    process.wait(10)
    grandchild = int((tmp_path / "log").read_text())
    assert is_running(grandchild)
    stop(process, limit_s=1)
    wait_gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from cli.embedded.processes import spawn
child = spawn(["sleep", "60"], log=Path({str(tmp_path / "log")!r}))
print(child.pid, flush=True)
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone(child)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_root_can_run_a_child_as_another_user(tmp_path: Path) -> None:
    assert run_to_end(["id", "-u"], log=tmp_path / "log", limit_s=10, user=65534) == "65534"


def test_a_failing_command_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"status 3(?s:.)*no such luck"):
        run_to_end(["/bin/sh", "-c", "echo no such luck; exit 3"], log=tmp_path / "log", limit_s=10)


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"sleep took longer than 0 s"):
        run_to_end(["sleep", "60"], log=tmp_path / "log", limit_s=0.1)


def test_a_log_is_emptied_under_its_writer_and_nothing_of_the_last_part_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"a" * 1000)
        rotate_log(log, limit_bytes=999)
        writer.write(b"b" * 10)
    assert log.read_bytes() == b"b" * 10
    assert (tmp_path / "log.1").read_bytes() == b"a" * 1000


def test_a_log_that_cannot_be_moved_stays_and_its_process_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    (tmp_path / "log.1").mkdir()
    assert spawn(["/bin/echo", "after"], log=log).wait(timeout=60) == 0
    assert log.read_bytes() == b"before\nafter\n"
