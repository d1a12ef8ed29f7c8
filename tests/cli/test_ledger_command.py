"""`vertumnus ledger export` and `import` as a user runs them, and what the other commands say of the record elsewhere."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from shared.contracts.events import RequestCompleted, RequestReceived
from simulation.workloads.files import read
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import BLOCK_TOKENS, World
from tests.services.ledger.record_writer import RecordWriter


async def recorded(url: str, world: World) -> None:
    writing = RecordWriter(url)
    await writing.restart()
    await writing.write(arrivals(world.log))
    await writing.close()


@pytest.fixture
def world(record_url: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """A pool's life, recorded where the commands look."""
    told = World(4)
    told.run(400)
    told.lose_node("n1", 1)
    told.run(100)
    asyncio.run(recorded(record_url, told))
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", record_url)
    return told


def vertumnus(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def test_a_record_is_replayed_and_verified_elsewhere(
    world: World, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "incident"
    told = json.loads(vertumnus("ledger", "export", str(file), "--json"))
    assert told == {"logs": 1, "rows": len(world.log), "to_seq": len(world.log), "after_seq": 0}
    at = str(len(world.log) - 50)
    state, checked = vertumnus("replay", "--at", at, "--json"), json.loads(vertumnus("verify", "--json"))["checked"]
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", database_url)
    assert f"{len(world.log):,} events of 1 log of main" in vertumnus("ledger", "import", str(file))
    assert vertumnus("replay", "--at", at, "--json") == state
    audited, verified = map(json.loads, vertumnus("verify", "--chain", "--json").splitlines())
    assert (audited["violations"], verified["checked"]) == ([], checked)
    assert "has a record already" in vertumnus("ledger", "import", str(file), status=1)
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    assert "the database was not migrated" in vertumnus("ledger", "import", str(file), status=1)


def test_what_is_refused_leaves_no_file_and_no_row(
    world: World, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "incident"
    assert "no sealed state lies before" in vertumnus("ledger", "export", str(file), "--from", "7", status=1)
    assert "begins after" in vertumnus("ledger", "export", str(file), "--to", "2001-01-01", status=1)
    assert "no request arrived" in vertumnus("ledger", "export", str(file), "--mooncake", "--to", "1", status=1)
    assert "No such file" in vertumnus("ledger", "export", str(tmp_path / "nowhere" / "incident"), status=1)
    assert list(tmp_path.iterdir()) == []
    vertumnus("ledger", "export", str(file), "--to", str(len(world.log) - 1))
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", elsewhere)
    cut = tmp_path / "cut"
    cut.write_bytes(file.read_bytes()[:-100])
    said = vertumnus("ledger", "import", str(cut), status=1)
    assert f"{cut}: the bundle is cut off" in said
    assert f"{len(world.log) - 1:,} events" in vertumnus("ledger", "import", str(file)), "nothing was in its way"


def test_the_recorded_load_is_a_trace(world: World, tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    received = [each for each in world.log if each.event.type == "request-received"]
    assert f"read it with --block-tokens {BLOCK_TOKENS}" in vertumnus("ledger", "export", str(file), "--mooncake")
    rows = list(read(file, BLOCK_TOKENS))
    assert len(rows) == len(received) > 50
    got = [each.data.output_tokens for each in world.log if isinstance(each.data, RequestCompleted)]
    asked = [each.data.max_tokens for each in received if isinstance(each.data, RequestReceived)]
    assert sum(row.output_tokens for row in rows) == sum(got) + sum(asked[: len(received) - len(got)])
    inspected = json.loads(vertumnus("trace", "inspect", str(file), "--block-tokens", str(BLOCK_TOKENS), "--json"))
    assert inspected["requests"] == len(received)
    # Six prefixes of twenty blocks are all that these prompts share.
    assert inspected["ideal_hit_rate"] > 0.3
    first = received[len(received) // 2]
    told = vertumnus("ledger", "export", str(file), "--mooncake", "--from", str(first.stream_seq), "--json")
    assert json.loads(told)["requests"] == len(received) - len(received) // 2
    in_time = sorted(received[len(received) // 2 :], key=lambda each: (each.event.time_ns, each.stream_seq))
    assert [row.prompt_tokens for row in read(file, BLOCK_TOKENS)] == [each.data.prompt_tokens for each in in_time]
