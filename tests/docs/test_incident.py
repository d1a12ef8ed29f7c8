"""The incident of docs/replay.md: every command there, in order, on the pool that it tells of."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.explain import write
from bench.replay import life, pool
from cli.main import app
from services.ledger.records import Arrival, record
from shared.contracts.events import PrefillCompleted
from shared.contracts.ids import NodeId

PAGE = (Path(__file__).resolve().parents[2] / "docs/replay.md").read_text()
INCIDENT = PAGE.partition("## An incident, played out\n")[2].partition("\n## ")[0]
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```\n(.*?)^```$", INCIDENT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("vertumnus ")
]
SHOWN = {
    "explain": ("policy paper", "predicted", "blocks-stored"),
    "verify": ("decisions come out again", "request-assigned, from recorded inputs"),
    "replay": ("n1",),
    "what-if": ("TTFT mean", "each node is simulated at its own median"),
    "ledger": ("1,200 events", "requests; read it with --block-tokens 512"),
    "trace": ("requests",),
}


def slow(arrivals: list[Arrival]) -> str:
    """A request of n1 for which nothing waited there."""
    for each in arrivals:
        event = record(each).event
        assert event is not None
        data = event.data
        if isinstance(data, PrefillCompleted) and data.worker.startswith("n1/") and not data.queue_us:
            return data.request
    raise AssertionError("no request of the story went to n1")


def test_every_command_of_the_incident_says_what_the_page_shows(
    record_url: str, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = life(pool(2, stragglers={NodeId("n1"): 3.0}), 240)
    asyncio.run(write(record_url, arrivals))
    request = slow(arrivals)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", record_url)
    assert len(COMMANDS) == 11
    said = dict.fromkeys(SHOWN, "")
    for command in COMMANDS:
        if command.startswith("vertumnus ledger import"):
            monkeypatch.setenv("VERTUMNUS_DATABASE_URL", elsewhere)
        _, *words = shlex.split(command.replace("REQUEST", request))
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{command}: {done.output}"
        said[words[0]] += done.output
    for name, parts in SHOWN.items():
        assert not [part for part in parts if part not in said[name]], said[name]
    predicted, measured = re.findall(r"service +([\d.]+) ms +([\d.]+) ms", said["explain"])[0]
    assert float(measured) > 2 * float(predicted)
