"""`vertumnus explain` on a real record of deciders that lagged behind the log."""

import asyncio
import json
from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

from cli.main import app
from replay.explaining import explain
from services.ledger import database, states
from services.ledger.patches import Place
from services.ledger.records import Arrival
from services.router import placement
from shared.contracts.envelope import Stored
from shared.contracts.events import CalibrationUpdated, RequestAssigned, RequestCompleted, RequestRedirected, RouterLost
from shared.contracts.ids import RequestId, RouterId, client_digest
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import World
from tests.replay.test_refits_verified import refitted
from tests.services.ledger.record_writer import RecordWriter


@pytest.fixture
async def world(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> World:
    """A recorded one, with prices that not all candidates are recorded of."""
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    made = World(2)
    made.run(500)
    await writer.write(arrivals(made.log))
    return made


async def vertumnus(*arguments: str, status: int = 0, columns: int = 100) -> str:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    result = await asyncio.to_thread(runner.invoke, app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


async def explained(*arguments: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(await vertumnus("explain", "--json", *arguments))
    return told


def last(world: World, kind: type[Any]) -> Any:
    return next(each.data for each in reversed(world.log) if isinstance(each.data, kind))


async def test_what_was_not_recorded_is_recomputed_and_gives_the_recorded_digest(world: World) -> None:
    partly = 0
    placed = [each for each in world.log if isinstance(each.data, RequestAssigned)]
    for stored in placed[::8]:
        told = await explained(stored.data.request, "--all")
        found = next(each for each in told["attempts"] if each["stream_seq"] == stored.stream_seq)
        prices = [(each["worker"], each["price_us"]) for each in found["candidates"]]
        assert placement.digest(prices, stored.data.digest_version) == stored.data.price_digest
        assert Counter(found["excluded_workers"].values()) == stored.data.excluded
        assert found["candidates"][0]["worker"] == stored.data.worker
        recorded = [each.model_dump(mode="json") for each in stored.data.candidates]
        assert all(each in found["candidates"] for each in recorded)
        assert found["recorded_all"] is (len(prices) == len(recorded))
        partly += not found["recorded_all"]
    assert partly, "the world is large enough that some candidates are not recorded"


async def test_nothing_is_asked_for_twice_and_no_state_is_read_that_lies_too_far_back(
    world: World, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a large record costs is these questions, one after the other."""
    await states.keep(writer.connection, Place(1, 1), b"not a state")
    asked, connect = list[str](), database.connect

    async def overheard(url: str) -> Any:
        connection = await connect(url)
        connection.add_query_logger(lambda each: asked.append(each.query))
        return connection

    monkeypatch.setattr(database, "connect", overheard)
    monkeypatch.setattr("replay.explaining.RUN_UP_EVENTS", 0)
    monkeypatch.setattr("replay.explaining.RECOMPUTED_EVENTS_MAX", 5)
    for recompute in (False, None):
        asked.clear()
        told = await explain(writer.url, last(world, RequestCompleted).request, recompute=recompute)
        assert told.attempts
        of_requests = [each for each in asked if "correlation" in each or "FROM requests" in each]
        assert len(of_requests) == len(set(of_requests)) == 2, of_requests
        assert not [each for each in asked if "content" in each]
        assert len(asked) <= (4 if recompute is False else 6), asked


async def test_without_recomputing_the_counts_are_told_and_how_to_get_more(world: World) -> None:
    told = await explained(last(world, RequestAssigned).request, "--recorded")
    assert {each["candidates"] for each in told["attempts"]} == {None}
    texts = [
        await vertumnus("explain", "--recorded", each.data.request)
        for each in world.log
        if isinstance(each.data, RequestAssigned)
    ][::8]
    assert any("--all` has them" in " ".join(text.split()) for text in texts), "wherever its line breaks"
    assert any("excluded: " in text for text in texts)


async def test_what_coefficients_were_fitted_to_is_told(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = refitted()
    await writer.write(arrivals(world.log))
    [fit] = [each.data for each in world.log if isinstance(each.data, CalibrationUpdated)]
    told = await explained(last(world, RequestAssigned).request, "--recorded")
    [note] = [each for each in told["notes"] if "fitted" in each]
    assert note == (
        f"coefficients toy+{fit.to_seq} were fitted to {fit.samples} prefills up to event {fit.to_seq}: "
        f"a mean error of 50.0% became {fit.error_after:.1%}"
    )


async def test_a_fit_that_cannot_be_read_is_told(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = refitted()
    damaged = [
        Arrival(each.stream_seq, each.raw.replace(b'"samples":', b'"samples":"x","was":'))
        if b'"calibration-updated"' in each.raw else each
        for each in arrivals(world.log)
    ]  # fmt: skip
    await writer.write(damaged)
    told = await explained(last(world, RequestAssigned).request, "--recorded")
    assert any("cannot be read: data.samples" in each for each in told["notes"])


async def test_a_terminal_shows_the_whole_story(world: World) -> None:
    completed = last(world, RequestCompleted).request
    for columns in (80, 100, 200):
        shown = await vertumnus("explain", completed, columns=columns)
        assert "…" not in shown, "nothing is cut off where there is no terminal"
        for part in (
            "attempt 1",
            "policy ",
            "occupancy",
            "predicted",
            "measured",
            "completed (stop)",
            "request-received",
        ):
            assert part in shown, (columns, part)
    redirected = last(world, RequestRedirected)
    assert "redirected" in await vertumnus("explain", f"chatcmpl-{redirected.request}")


async def test_the_decision_that_an_answer_names_is_explained(world: World) -> None:
    placed = next(each for each in reversed(world.log) if isinstance(each.data, RequestAssigned))
    assert f"request {placed.data.request}" in await vertumnus("explain", str(placed.event.id))
    for no_request in (UUID(int=7), next(each.event.id for each in world.log if not each.event.correlation)):
        assert "no request of the record" in await vertumnus("explain", str(no_request), status=1)


async def test_an_unknown_request_is_told_with_how_far_the_record_goes(world: World) -> None:
    said = await vertumnus("explain", "nobody", status=1)
    assert "no request of the record has this id" in said
    assert f":{len(world.log)}" in said


async def test_an_empty_record_says_so(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    assert "reaches to" in await vertumnus("explain", "nobody", status=1)


def named_by_client(log: list[Stored], request: RequestId) -> list[Stored]:
    return [
        each._replace(
            event=each.event.model_copy(
                update={"data": each.data.model_copy(update={"client_digest": client_digest("mine/1")})}
            )
        )
        if each.event.type == "request-received" and each.data.request == request  # type: ignore[attr-defined]
        else each
        for each in log
    ]


async def test_a_request_is_found_by_the_id_its_client_gave_it(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(3)
    world.run(200)
    first, *_, request = [each.data.request for each in world.log if isinstance(each.data, RequestAssigned)]
    await writer.write(arrivals(named_by_client(named_by_client(world.log, first), request)))
    told = await explained("mine/1")
    assert told["request"] == request
    assert "1 earlier requests" in told["notes"][0]
    assert (await explained(first))["request"] == first
    assert json.loads(await vertumnus("events", "get", "--json", "mine/1"))["request"]["request"] == request


async def test_a_lost_router_ends_the_story(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(1, routers=1)
    world.run(60)
    lost = RouterLost(router=RouterId("router-1"), source="router-1")
    open_request = next(iter(world.routers[0].state.loads.open))
    world.store(world.seal(world.controller, lost))
    await writer.write(arrivals(world.log))
    told = await explained(open_request)
    assert told["end"] == {"type": "router-lost", "router": "router-1", "source": "router-1"}
    assert "was declared lost" in await vertumnus("explain", open_request)


async def test_what_a_gap_swallowed_is_said(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(2)
    world.run(300)
    assigned = next(
        each
        for each in world.log[len(world.log) // 2 :]
        if isinstance(each.data, RequestAssigned) and world.log[each.stream_seq - 2].event.type == "request-received"
    )
    cut, request = assigned.stream_seq - 1, assigned.data.request
    await writer.write(arrivals(world.log[: cut - 1]))
    await writer.connection.execute(
        "INSERT INTO gaps (log, from_seq, to_seq, accepted_by, reason) VALUES ($1, $2, $2, 'ann', '')",
        writer.checkpoint.log,
        cut,
    )
    await writer.write(arrivals(world.log[cut:], first_seq=cut + 1))
    told = await explained(request)
    assert told["received"] is None
    assert any("its beginning is not in the record" in note for note in told["notes"])
    assert any(f"events {cut} to {cut} are missing" in note for note in told["notes"])
    assert any("cannot be recomputed" in note for note in told["notes"])
    await vertumnus("explain", request)


async def test_a_request_of_an_older_log_says_so(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", writer.url)
    world = World(2)
    world.run(100)
    await writer.write(arrivals(world.log))
    await writer.restart(UUID(int=2))
    request = last(world, RequestAssigned).request
    told = await explained(request)
    assert told["log"] == str(UUID(int=1))
    assert "it is of log 1 of 2" in told["notes"][0]
