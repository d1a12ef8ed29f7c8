"""`vertumnus replay` gives the state that the read models had at the time."""

import asyncio
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from replay.instants import Instant, states
from services.ledger import queries
from services.ledger.exporting import export
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import World
from tests.services.ledger.conftest import Seals
from tests.services.ledger.record_writer import RecordWriter
from tests.services.ledger.test_audit import Sealed
from tests.services.ledger.test_snapshots import keep


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
    said = await vertumnus("replay", "--at", "2001-01-01", status=1)
    assert "begins after that instant: the record covers 00000000-" in said
    end = await vertumnus("replay", "--at", str(len(world.log) + 1), status=1)
    assert f":{len(world.log)}, 2027-01-15T08:00:00" in end
    assert "either --at" in await vertumnus("replay", status=2)
    assert "neither a sequence nor a time" in await vertumnus("replay", "--at", "noon", status=2)


async def test_from_a_snapshot_comes_what_comes_from_the_beginning(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(6)
    world.run(400)
    third = len(world.log) // 3
    for begin in (0, third):
        await writer.write(arrivals(world.log[begin : begin + third], begin + 1))
        await keep(writer)
    await writer.write(arrivals(world.log[2 * third :], 2 * third + 1))
    asked = [Instant(seq, True) for seq in (third - 1, third, third + 50, 2 * third + 50)]
    asked.append(Instant(world.log[-1].event.time_ns, False))
    one_by_one = [(await states(writer.url, [each]))[0] for each in asked]
    assert [each["folded_from"] and each["folded_from"]["stream_seq"] for each in one_by_one] == [
        None, third, third, 2 * third, 2 * third,
    ]  # fmt: skip
    for seq, told in zip((third, 2 * third), (one_by_one[1], one_by_one[3]), strict=True):
        shown = await vertumnus("replay", "--at", str(told["place"]["stream_seq"]))
        assert f"folded from the snapshot at {told['place']['log']}:{seq}" in shown
    await writer.connection.execute("DELETE FROM snapshots")
    told = await states(writer.url, asked)
    assert [{**each, "folded_from": None} for each in one_by_one] == told


async def test_one_clock_that_is_ahead_does_not_hide_what_came_later(writer: RecordWriter) -> None:
    world = World(6)
    world.run(200)
    third, hour_ns = len(world.log) // 3, 3_600 * 10**9
    ahead = world.log[third // 2]
    event = ahead.event.model_copy(update={"time_ns": ahead.event.time_ns + 20 * 365 * 24 * hour_ns})
    world.log[third // 2] = ahead._replace(event=event)
    await writer.write(arrivals(world.log[:third]))
    sealed_ns = world.log[third - 1].event.time_ns + 1
    await keep(writer, sealed_ns)
    await writer.write(arrivals(world.log[third : 2 * third], third + 1))
    await keep(writer, world.now_ns + hour_ns)
    await writer.write(arrivals(world.log[2 * third :], 2 * third + 1))
    times = [world.log[third + 20].event.time_ns, world.now_ns + 2 * hour_ns]
    later = [each.stream_seq for each in world.log[third:] if each.event.time_ns > times[0]]
    last = [later[0] - 1, len(world.log)]
    assert last[0] > third
    told = await states(writer.url, [Instant(each, False) for each in times])
    assert [each["place"]["stream_seq"] for each in told] == last
    file = io.BytesIO()
    assert (await export(writer.url, file, to_ns=times[0])).to_seq == last[0]


async def test_caches_behind_a_day_that_has_gone_are_not_made_up(writer: RecordWriter) -> None:
    record = Sealed(writer, Seals())
    await record.write()
    sealed_seq = writer.checkpoint.stream_seq
    known = (await states(writer.url, [Instant(sealed_seq, True)]))[0]
    await keep(writer)
    await record.say(await record.said_to_go())
    await record.drop()
    [before, at] = [(await states(writer.url, [Instant(seq, True)]))[0] for seq in (sealed_seq - 5, sealed_seq)]
    assert (before["caches_known"], at["caches_known"]) == (False, True)
    assert at["workers"] == known["workers"] != before["workers"]
