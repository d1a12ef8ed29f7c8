"""`vertumnus replay` gives the state that the read models had at the time."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from services.ledger import queries
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import World
from tests.services.ledger.record_writer import RecordWriter


async def vertumnus(*arguments: str, status: int = 0) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


async def test_a_past_state_is_what_the_read_models_said_then(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(4)
    world.run(400)
    third = len(world.log) // 3
    then: dict[int, dict[str, Any]] = {}
    for begin in (0, third, 2 * third):
        await writer.write(arrivals(world.log[begin : begin + third], begin + 1))
        then[begin + third] = await queries.state(writer.connection)
    for seq, live in then.items():
        told = json.loads(await vertumnus("replay", "--at", str(seq), "--json"))
        assert told["place"]["stream_seq"] == seq
        assert told["open_requests"] == live["open_requests"]
        assert {
            (name, each["schedulable"], each["trust"], each["blocks"]) for name, each in told["workers"].items()
        } == {(each["worker"], each["schedulable"], each["trust"], each["blocks"]) for each in live["workers"]}
        for node in live["nodes"]:
            assert told["nodes"][node["node"]].items() <= node.items()
        if live["parameters"]:
            assert told["parameters"] == live["parameters"][0]["value"]
    shown = await vertumnus("replay", "--at", str(third))
    assert "open requests" in shown
    assert "n0/1/0" in shown


async def test_a_time_ends_before_the_first_later_event_and_two_instants_compare(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(5)
    world.run(200)
    begun = len(world.log)
    world.now_ns += 10**9
    world.lose_node("n1", 1)
    await writer.write(arrivals(world.log))
    time = datetime.fromtimestamp((world.now_ns - 5 * 10**8) / 1e9, UTC).isoformat()
    told = json.loads(await vertumnus("replay", "--at", time, "--json"))
    assert told["place"]["stream_seq"] == begun
    found = json.loads(await vertumnus("replay", "--diff", time, str(begun + 1), "--json"))
    assert {"field": "nodes.n1.alive", "before": True, "after": False} in found
    assert "nodes.n1.alive" in await vertumnus("replay", "--diff", str(begun), str(begun + 1))
    assert json.loads(await vertumnus("replay", "--diff", str(begun), str(begun), "--json")) == []


async def test_what_cannot_be_told_is_said(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(5)
    await writer.write(arrivals(world.log))
    assert "begins after" in await vertumnus("replay", "--at", "2001-01-01", status=1)
    assert "either --at" in await vertumnus("replay", status=2)
    assert "neither a sequence nor a time" in await vertumnus("replay", "--at", "noon", status=2)
