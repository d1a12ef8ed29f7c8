"""The whole system as `vertumnus up` runs it, all of it real but for the engine, which is the modelled one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.embedded.data_dir import DataDir
from tests.support.up import Up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")

PROMPT = list(range(200))
RECOVERY_LIMIT_S = 90
"""For a loaded machine; an idle one needs two to five seconds."""


class System:
    """The running system, its API and its record."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.up = Up(directory)
        self.printed = self.up.ready()
        key = (directory / "operator.key").read_text()
        self.api = httpx.Client(base_url=self.printed["api_url"], timeout=30)
        self.record = httpx.Client(base_url=self.printed["console_url"], headers={"authorization": f"Bearer {key}"})

    def ask(self) -> httpx.Response:
        """One completion."""
        return self.api.post("/completions", json={"model": "modelled", "prompt": PROMPT, "max_tokens": 3})

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`vertumnus <arguments>` on this system."""
        run = [sys.executable, "-c", "from cli.main import app; app()", *arguments]
        environment = {**os.environ, "VERTUMNUS_DATA_DIR": str(self.directory)}
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def completed(self) -> int:
        """How many completions the record holds. Raises while the record is away."""
        answer = self.record.get("/v1/events", params={"type": "request-completed", "limit": 100})
        return len(answer.raise_for_status().json()["events"])


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    directory = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    directory.chmod(0o711)
    running = System(directory)
    # These few requests are less than the pool could carry: after a minute of them the policy would merge workers.
    assert running.command("pin", "n0", "--reason", "tests name its workers").stdout == "composition-pinned\n"
    yield running
    status, said = running.up.end(signal.SIGTERM)
    assert status == 0, said
    assert DataDir(directory).running() is None
    shutil.rmtree(directory)


def eventually(holds: Callable[[], Any]) -> None:
    """Wait until `holds()` is true. What is away meanwhile raises an HTTP error, which is waited out too."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = holds()
        except httpx.HTTPError as error:
            last = error
        if last and not isinstance(last, Exception):
            return
        time.sleep(0.1)
    raise AssertionError(f"still {last!r} after {RECOVERY_LIMIT_S} s")


def test_a_request_is_answered_and_recorded(system: System) -> None:
    answer = system.ask()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    eventually(lambda: system.completed() == 1)


@pytest.mark.parametrize("victim", ["services.worker", "services.controller", "nats-server", "services.router"])
def test_serving_goes_on_after_the_death_of(system: System, victim: str) -> None:
    pid = system.up.child(victim)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: victim in "".join(line for child, line in system.up.children().items() if child != pid))
    before = system.completed()
    eventually(lambda: system.ask().status_code == 200)
    eventually(lambda: system.completed() > before)


def test_serving_does_not_need_the_record(system: System) -> None:
    before = system.completed()
    os.kill(system.up.child("bin/postgres"), signal.SIGKILL)
    assert system.ask().status_code == 200
    eventually(lambda: system.completed() == before + 1)


def test_status_tells_what_runs(system: System) -> None:
    def told() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(system.command("status", "--json").stdout)
        return shown

    eventually(lambda: all(told()["services"].values()))
    assert set(told()["services"]) == {"ledger", "controller", "cachemgr", "worker", "router"}
    assert [each["degree"] for each in told()["workers"]] == [1, 1, 2, 4]
    assert system.command("status").returncode == 0
    assert "n0/1/4" in system.command("status").stdout


def degrees(system: System) -> list[int]:
    return [each["degree"] for each in json.loads(system.command("status", "--json").stdout)["workers"]]


def test_an_operator_changes_a_composition_while_requests_are_served(system: System) -> None:
    for composition in ("2,2,4", "1,1,2,4"):
        asked = system.command("reconfigure", "n0", composition, "--reason", "to see it")
        assert (asked.stdout, asked.returncode) == ("reconfiguration-planned\n", 0), asked.stderr
        assert system.ask().status_code == 200
        eventually(lambda wanted=composition: degrees(system) == [int(each) for each in wanted.split(",")])
    assert system.command("reconfigure", "n0", "1,1,2,4").stdout == "that holds already\n"


def test_what_an_operator_cannot_have_is_said(system: System) -> None:
    refused = system.command("reconfigure", "n0", "4,8")
    assert (refused.returncode, "degree-8 worker" in refused.stderr) == (2, True)
    refused = system.command("reconfigure", "n0", "4,4,8")
    assert (refused.returncode, "16 ranks, but node n0 has 8" in refused.stderr) == (2, True)
    refused = system.command("drain", "n9")
    assert (refused.returncode, "'n9' is not one of ['n0']" in refused.stderr) == (2, True)


def test_the_record_is_whole_after_every_death(system: System) -> None:
    eventually(lambda: system.command("events", "audit", "--settled").returncode == 0)
