"""Every command of docs/replay.md: those of its incident in order, on the pool it tells of, and the others on that record."""

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from bench.explain import write
from bench.replay import life, pool
from cli.main import app
from services.ledger import database
from services.ledger.records import Arrival, record
from shared.contracts.events import PrefillCompleted
from shared.contracts.ids import NodeId
from tests.services.ledger.record_writer import tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/replay.md").read_text()
INCIDENT = PAGE.partition("## An incident, played out\n")[2].partition("\n## ")[0]


def commands_of(text: str) -> list[str]:
    return [
        line.partition("#")[0].strip()
        for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line.startswith("vertumnus ")
    ]


COMMANDS = commands_of(INCIDENT)
OTHERS = list(dict.fromkeys(commands_of(PAGE.replace(INCIDENT, ""))))
RUN_ELSEWHERE = {
    "vertumnus events tail": "tests/integration/test_ledger.py",
    "vertumnus trace send": "tests/cli/test_trace_command.py",
    "vertumnus ledger export incident --from": "tests/replay/test_parts_of_records.py",
}
"""These need a stream, a system that serves, a record with seals."""

OF_THE_RECORD = {
    "chatcmpl-…": "chatcmpl-REQUEST", "4711": "60", "5000": "867", "2026-11-30T03:00": "1970-01-01T00:00:10",
    "2026-11-30T03:12": "1970-01-01T00:00:50", "2026-11-30T03:20": "1970-01-01T00:01:40",
    "2026-11-30T03:30": "1970-01-01T00:02", "--seeds 8": "--seeds 1", "--node 5x8": "--node 5x8 --seeds 1",
    "lam_vertumnus=0": "lam_vertumnus=0 --seeds 1",
    "--block-tokens 64": "--block-tokens 512",
}  # fmt: skip
"""What the page names, as the played pool has it; one seed shows that a command runs."""
SHOWN = {
    "explain": ("policy paper", "predicted", "blocks-stored"),
    "verify": ("decisions come out again", "request-assigned, from recorded inputs"),
    "replay": ("n1",),
    "what-if": ("TTFT mean", "each node is simulated at its own median"),
    "ledger": ("1,200 events", "requests; read it with --block-tokens 512"),
    "trace": ("requests",),
}


class Played(NamedTuple):
    """The incident's record, and the request that its client asks about."""

    url: str
    request: str


@pytest.fixture(scope="module")
def played(new_record: Callable[[], str]) -> Played:
    url, arrivals = new_record(), life(pool(2, stragglers={NodeId("n1"): 3.0}), 240)
    asyncio.run(write(url, arrivals))
    return Played(url, slow(arrivals))


def run(command: str, played: Played) -> str:
    _, *words = shlex.split(command.replace("REQUEST", played.request))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{command}: {done.output}"
    return done.output


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
    played: Played, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", played.url)
    assert len(COMMANDS) == 11
    said = dict.fromkeys(SHOWN, "")
    for command in COMMANDS:
        if command.startswith("vertumnus ledger import"):
            monkeypatch.setenv("VERTUMNUS_DATABASE_URL", elsewhere)
        said[command.split()[1]] += run(command, played)
    for name, parts in SHOWN.items():
        assert not [part for part in parts if part not in said[name]], said[name]
    predicted, measured = re.findall(r"service +([\d.]+) ms +([\d.]+) ms", said["explain"])[0]
    assert float(measured) > 2 * float(predicted)


def test_every_other_command_of_the_page_runs(
    played: Played, new_record: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran, read_models = 0, asyncio.run(all_rows(played.url))
    for command in OTHERS:
        if file := next((file for begun, file in RUN_ELSEWHERE.items() if command.startswith(begun)), None):
            assert (ROOT / file).is_file()
            continue
        url = new_record() if command.startswith("vertumnus ledger import") else played.url
        monkeypatch.setenv("VERTUMNUS_DATABASE_URL", url)
        for named, here in OF_THE_RECORD.items():
            command = command.replace(named, here)
        assert run(command, played)
        ran += 1
    assert ran >= 15
    assert asyncio.run(all_rows(played.url)) == read_models, "what was rebuilt is what was written"


async def all_rows(url: str) -> dict[str, list[dict[str, Any]]]:
    connection = await database.connect(url)
    rows = await tables(connection)
    await connection.close()
    return rows
