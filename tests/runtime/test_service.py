"""A service as a process: it starts, says how it is, and ends as it should."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Queue
from typing import Any

import httpx
import pytest

from cli.embedded.nats import EmbeddedNats
from shared.runtime.nats_link import connect
from shared.runtime.service import STOP_LIMIT_S, run
from tests.runtime import program


class Program:
    """One running `tests.runtime.program`."""

    def __init__(self, nats_url: str, **settings: object) -> None:
        variables = {f"VERTUMNUS_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.program"],
            env={**os.environ, "VERTUMNUS_NATS_URL": nats_url, "VERTUMNUS_POOL": "test", **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._arrived: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, event: str, limit_s: float = 60) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while True:
            line = self._arrived.get(timeout=max(0.01, end - time.monotonic()))
            if line["event"] == event:
                return line

    @property
    def url(self) -> str:
        line = next((line for line in self.lines if line["event"] == "listening"), None) or self.wait_for("listening")
        return f"http://127.0.0.1:{line['port']}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=10)

    def end(self, limit_s: float = 60) -> int:
        """Its exit code, once everything that it said has been read."""
        code = self.process.wait(limit_s)
        self._reader.join(limit_s)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.text.append(line)
            with suppress(json.JSONDecodeError):
                self.lines.append(json.loads(line))
                self._arrived.put(self.lines[-1])


Start = Callable[..., Program]


@pytest.fixture
def start(nats_server: EmbeddedNats) -> Iterator[Start]:
    started: list[Program] = []

    def starter(url: str | None = None, **settings: object) -> Program:
        started.append(Program(url or nats_server.url, **settings))
        return started[-1]

    yield starter
    for each in started:
        each.process.kill()
        each.process.wait()


def until(holds: Callable[[], object], limit_s: float = 60) -> float:
    """How long it took until `holds()`."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < limit_s, f"not within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - begin


def test_a_service_says_how_it_is_and_stops_in_order(start: Start, nats_server: EmbeddedNats) -> None:
    running = start(stop_s=2, log_level="debug")
    assert running.get("/healthz").text == "ok\n"
    assert running.get("/readyz").status_code == 200
    assert running.get("/record?n=3").status_code == 200
    until(lambda: "vertumnus_seen_seq 3.0" in running.get("/metrics").text)
    until(lambda: "vertumnus_outbox_events 0.0" in running.get("/metrics").text)
    metrics = running.get("/metrics").text
    for name in ("vertumnus_outbox_events 0.0", "vertumnus_fold_lag_seconds ", "process_resident_memory_bytes "):
        assert name in metrics
    running.process.send_signal(signal.SIGTERM)
    assert running.get("/readyz").status_code == 200, "it serves while it stops"
    assert running.end() == 0
    stamped = running.wait_for("stopped")
    assert stamped["service"] == "program"
    assert stamped["source"].startswith("program-1-")
    assert {line["source"] for line in running.lines} == {stamped["source"]}
    assert nats_server._password
    assert nats_server._password not in "".join(running.text)


def test_an_idle_connection_outlives_what_clients_keep_one_for(start: Start) -> None:
    running = start()
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"))
    for pause_s in (kept_s + 0.5, 0):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b"ok\n"
        # Without this it would connect anew instead of failing.
        connection.auto_open = 0
        time.sleep(pause_s)
    connection.close()


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    running = start(stop_s=60)
    assert running.url
    running.process.send_signal(signal.SIGINT)
    running.wait_for("stopping")  # two signals that nobody has noticed yet are one
    begin = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    running.end()
    assert time.monotonic() - begin < STOP_LIMIT_S - 1, "the limit of a stop did not end it"


def test_while_the_log_is_away_it_is_not_ready_and_afterwards_it_is(start: Start, nats_server: EmbeddedNats) -> None:
    running = start()
    assert running.url
    nats_server.stop(kill=True)
    running.wait_for("nats disconnected")
    assert running.get("/record").text == "1"
    until(lambda: running.get("/readyz").status_code == 503)
    assert running.get("/readyz").text == "the log does not take events\n"
    nats_server.start()
    until(lambda: running.get("/readyz").status_code == 200)
    until(lambda: "vertumnus_seen_seq 1.0" in running.get("/metrics").text)


def test_it_stops_while_the_log_is_away(start: Start, nats_server: EmbeddedNats) -> None:
    running = start()
    assert running.url
    nats_server.stop(kill=True)
    running.wait_for("nats disconnected")
    running.get("/record?n=3")
    begin = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    assert time.monotonic() - begin < STOP_LIMIT_S - 1, "the limit of a stop did not end it"
    assert running.wait_for("events not published")["events"] == 3


def test_a_lost_log_ends_it_with_code_1_and_says_why(start: Start, nats_server: EmbeddedNats) -> None:
    running = start()
    assert running.url

    async def delete_the_stream() -> None:
        link = await connect(nats_server.url, "test")
        await link.client.jetstream().delete_stream("vertumnus-test-events")
        await link.close()

    asyncio.run(delete_the_stream())
    assert running.end() == 1
    assert running.wait_for("failed")["error"] == "LogLost: stream vertumnus-test-events is gone"
    assert running.text[-1] == "LogLost: stream vertumnus-test-events is gone\n"


def test_a_killed_leader_is_replaced_once_its_lease_is_over(start: Start) -> None:
    first = start(instance="1")
    until(lambda: first.get("/term").json() == 1)
    second = start(instance="2")
    assert second.get("/term").json() is None
    first.process.kill()
    assert until(lambda: second.get("/term").json() == 2) > 1


@pytest.mark.parametrize(
    ("settings", "complaints"),
    [
        ({"pool": "a.b"}, ["VERTUMNUS_POOL: Value error, pool and instance: 'a.b' must be 1-64 letters"]),
        (
            {"http_port": 70000, "stop_s": "soon"},
            [
                "VERTUMNUS_HTTP_PORT: Input should be less than or equal to 65535",
                "VERTUMNUS_STOP_S: Input should be a valid",
            ],
        ),
        ({"log_level": "loud"}, ["VERTUMNUS_LOG_LEVEL: Input should be 'debug', 'info', 'warning' or 'error'"]),
        ({"nats_password_file": "/nowhere"}, ["VERTUMNUS_NATS_PASSWORD_FILE: Path does not point to a file"]),
    ],
)
def test_bad_settings_end_it_with_code_2_and_their_names(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, object],
    complaints: list[str],
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"VERTUMNUS_{name.upper()}", str(value))
    with pytest.raises(SystemExit) as ended:
        run(program.main)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(complaint) for line, complaint in zip(lines, complaints, strict=True))


def test_a_taken_port_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = start(http_port=port)
        assert running.end() == 1
    assert running.text[-1].startswith(f"CannotListen: VERTUMNUS_HTTP_HOST, VERTUMNUS_HTTP_PORT: 127.0.0.1:{port}: ")


def test_a_wrong_password_ends_it_at_once_without_being_shown(start: Start, nats_server: EmbeddedNats) -> None:
    running = start(nats_server.url.replace(nats_server._password, "guessed"))
    assert running.end() == 1
    assert "no answer within" not in running.text[-1], "no use in trying for ten seconds"
    assert "Authorization Violation" in running.text[-1]
    assert running.text[-1].startswith("Unavailable: cannot connect to NATS at 127.0.0.1:")
    assert "guessed" not in "".join(running.text)
