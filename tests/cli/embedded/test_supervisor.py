"""The supervisor with real child processes: a small HTTP server stands in for a service."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.embedded import supervisor
from cli.embedded.loopback import answers_ok, free_port
from cli.embedded.processes import StartFailed, is_running
from cli.embedded.services import STOP_LIMIT_S, ServiceProcess
from cli.embedded.supervisor import Interrupted, Supervisor


class Bench:
    """A supervisor, what it said, and services for it to keep."""

    def __init__(self, directory: Path, stand_in: str) -> None:
        (directory / "stand_in.py").write_text(stand_in)
        self.said: list[str] = []
        self.interrupted = threading.Event()
        self.supervisor = Supervisor(self.said.append, self.interrupted)
        self._directory = directory

    def service(self, name: str, **env: str) -> ServiceProcess:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self._directory), **env}
        return ServiceProcess(name, "stand_in", env=env, port=free_port(), log=self._directory / f"{name}.log")

    def watch_until(self, reached: Callable[[], bool]) -> None:
        """Let the supervisor watch, in this thread as it must, until `reached`."""

        def look() -> None:
            deadline = time.monotonic() + 20
            while not reached() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.interrupted.set()

        looker = threading.Thread(target=look)
        looker.start()
        self.supervisor.watch()
        looker.join()
        assert reached(), self.said
        self.interrupted.clear()


@pytest.fixture
def bench(tmp_path: Path, stand_in: str) -> Iterator[Bench]:
    made = Bench(tmp_path, stand_in)
    yield made
    made.supervisor.stop()


def test_services_start_side_by_side_and_stop_in_reverse_order(bench: Bench) -> None:
    services = [bench.service("ledger"), bench.service("router")]
    bench.supervisor.start(services)
    assert all(answers_ok(service.port, "/readyz") for service in services)
    pids = [service.pid for service in services]
    bench.supervisor.stop()
    assert bench.said[-2:] == ["router has stopped", "ledger has stopped"]
    assert not any(pid is not None and is_running(pid) for pid in pids)


def test_a_crashed_service_is_started_again_on_its_port(bench: Bench) -> None:
    service = bench.service("cachemgr")
    bench.supervisor.start([service])
    first, port = service.pid, service.port
    assert first is not None
    os.kill(first, signal.SIGSEGV)
    bench.watch_until(lambda: any("is ready again" in line for line in bench.said))
    assert service.pid not in (None, first)
    assert service.port == port
    assert answers_ok(port, "/readyz")
    assert any("cachemgr ended with status -11; starting it again in 0.5 s" in line for line in bench.said)


def test_a_service_that_cannot_start_is_named_with_its_last_words(bench: Bench) -> None:
    with pytest.raises(StartFailed, match=r"worker ended with status 1(?s:.)*cannot find the model"):
        bench.supervisor.start([bench.service("router"), bench.service("worker", STAND_IN_FAILS="1")])
    bench.supervisor.stop()
    assert bench.said[-2:] == ["worker has stopped", "router has stopped"]


def test_a_start_that_takes_longer_says_once_what_it_waits_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TELL_AFTER_S", 0.0)
    reason = "g1:30000 does not answer"
    service = bench.service("worker", STAND_IN_WAITS=reason)
    ready, heard = service.ready, list[str]()

    def look() -> bool:
        answered = ready()
        heard.append(service.why_not_ready)
        if heard.count(reason) > 3:
            bench.interrupted.set()
        return answered

    monkeypatch.setattr(service, "ready", look)
    with pytest.raises(Interrupted):
        bench.supervisor.start([service])
    bench.interrupted.clear()
    assert bench.said.count(f"worker is not ready: {reason}") == 1


def test_how_far_a_start_has_got_is_told_from_time_to_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TELL_AFTER_S", 0.0)
    monkeypatch.setattr(supervisor, "TELL_AGAIN_S", 0.5)
    service = bench.service("worker", STAND_IN_WAITS="reading")
    looks, begun = list[int](), time.monotonic()

    def look() -> bool:
        looks.append(len(looks))
        service.why_not_ready = f"{len(looks)} % are read"
        if time.monotonic() - begun > 1.2:
            bench.interrupted.set()
        return False

    monkeypatch.setattr(service, "ready", look)
    with pytest.raises(Interrupted):
        bench.supervisor.start([service])
    bench.interrupted.clear()
    assert "worker is not ready: 1 % are read" in bench.said
    assert 2 <= sum("are read" in line for line in bench.said) <= 4


def test_a_start_that_takes_too_long_ends_with_what_it_waited_for(bench: Bench) -> None:
    with pytest.raises(
        StartFailed, match=r"router was not ready within 0 s: no answer \(ConnectionRefusedError\); .*router\.log"
    ):
        bench.supervisor.start([bench.service("router")], limit_s=0.0)


def test_a_request_to_stop_ends_the_wait_for_a_start(bench: Bench) -> None:
    bench.interrupted.set()
    with pytest.raises(Interrupted):
        bench.supervisor.start([bench.service("router")])
    bench.interrupted.clear()


def test_a_second_request_ends_what_is_slow_to_stop(bench: Bench) -> None:
    service = bench.service("router")
    bench.supervisor.start([service])
    assert service.pid is not None
    os.kill(service.pid, signal.SIGSTOP)
    threading.Timer(0.3, bench.supervisor.kill).start()
    before = time.monotonic()
    bench.supervisor.stop()
    assert time.monotonic() - before < STOP_LIMIT_S - 1, "it was ended, not waited for"
