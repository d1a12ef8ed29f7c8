"""A half of the demo, played small: real servers and services, modelled GPUs."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from cli.demo.halves import scale
from cli.demo.playing import play
from cli.demo.running import DemoFailed, Verdict, compared
from cli.demo.stage import Stage
from cli.demo.table import figures, passed
from cli.embedded.data_dir import AlreadyRunning, DataDir
from cli.embedded.supervisor import Interrupted
from cli.trace.measuring import OK, Outcome
from simulation.workloads.rows import Row

SMALL = scale()._replace(requests=120, requests_per_s=4.0, moves=((8,), (2, 2, 2, 2)))
"""Six seconds of requests, and a node that is asked to merge and then to split meanwhile."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataDir]:
    """A data directory that the user of Postgres can reach; the signal handlers that a half sets do not outlive it."""
    # The demo is to leave the servers of others alone.
    monkeypatch.setenv("VERTUMNUS_NATS_URL", "nats://127.0.0.1:9")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with tempfile.TemporaryDirectory(prefix="vertumnus-test-") as directory:
        Path(directory).chmod(0o711)
        yield DataDir(Path(directory) / "demo")
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    with (tmp_path / "said").open("w+") as file:
        yield Console(file=file, width=80, soft_wrap=True)


def said(console: Console) -> str:
    console.file.flush()
    return Path(console.file.name).read_text()


Children = Callable[[], dict[int, str]]


@pytest.fixture
def children() -> Children:
    """Asks for the processes that the test has started, with their command lines: servers of the session are not its own."""
    before = every_child().keys()
    return lambda: {child: line for child, line in every_child().items() if child not in before}


def every_child() -> dict[int, str]:
    pid = os.getpid()
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
    return found


def during(home: DataDir, act: Callable[[], None]) -> threading.Thread:
    """Do `act` two seconds after the system in `home` runs."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while home.running() is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(2)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_half_survives_a_crash_and_shows_everything(home: DataDir, console: Console, children: Children) -> None:
    home.path.mkdir()
    (home.path / "nats").mkdir()
    (home.path / "nats" / "of the last demo").touch()

    def kill() -> None:
        (victim,) = [pid for pid, line in children().items() if "services.cachemgr" in line]
        os.kill(victim, signal.SIGKILL)

    killing = during(home, kill)
    ran = play(SMALL, None, home, console, threading.Event())
    killing.join()
    assert "cachemgr ended with status -9; starting it again" in said(console)
    told = figures(ran)
    assert passed(told), told
    assert told["answered"] == ran.audit.requests == SMALL.requests
    assert told["events"] > 5 * SMALL.requests
    assert told["cached_share"] > 0.1
    # Without a cache manager a switch is called off after 2 s, so not each of them need have been committed.
    assert told["reconfigurations"] >= len(ran.moved) == len(SMALL.moves)
    assert told["transformers"] is None
    assert not (home.path / "nats" / "of the last demo").exists()
    assert not children()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_ctrl_c_ends_a_half_in_order(home: DataDir, console: Console, children: Children) -> None:
    interrupting = during(home, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        play(SMALL._replace(requests=2_000), None, home, console, threading.Event())
    interrupting.join()
    assert "stopping; a second Ctrl-C ends everything at once" in said(console)
    assert said(console).rstrip().endswith("nats has stopped")
    assert not children()


def test_a_demo_beside_another_is_refused_and_harms_nothing(home: DataDir, console: Console) -> None:
    with home.locked():
        (home.path / "of the other").touch()
        with pytest.raises(AlreadyRunning):
            play(SMALL, None, home, console, threading.Event())
        assert (home.path / "of the other").exists()


def stage(home: DataDir) -> Stage:
    return Stage(SMALL, home, print, threading.Event())


def answer(*token_ids: int) -> tuple[Row, Outcome]:
    return Row(0, 20, len(token_ids), (7, 8), 16), Outcome(OK, "", 20, len(token_ids), 0, 0, 0.1, 0.1, token_ids)


def test_answers_are_compared_with_transformers(smollm2: Path, home: DataDir) -> None:
    told: list[Verdict] = []
    answers = [answer(300, 300, 300), answer(301), (answer()[0], Outcome("connect", "", 20, 0, 0, 0, 0, 0))]
    verdict = stage(home).wait(compared(smollm2, answers, lambda so_far: told.append(so_far.copy())))
    assert (verdict["answers"], verdict["positions"]) == (2, 4)
    assert verdict["mismatches"] > 0, "a token that nobody would choose is noticed"
    assert [each["answers"] for each in told] == [1, 2]


def test_a_comparison_that_cannot_be_made_says_why(tmp_path: Path, home: DataDir) -> None:
    with pytest.raises(DemoFailed, match=r"transformers ended with status 1: (?s:.)*nothing"):
        stage(home).wait(compared(tmp_path / "nothing", [answer(300)], lambda _: None))
