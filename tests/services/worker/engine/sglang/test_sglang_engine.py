"""The engine on a local server that repeats recorded answers: every path between an agent and HTTP and ZMQ, without SGLang.

What a real server does with the same requests is in tests/sglang."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import (
    Busy,
    EngineDied,
    EngineError,
    PrefillItem,
    PrefillStep,
    RolledBack,
    Sampling,
    StaleEpoch,
    StepResult,
)
from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.settings import ServerAddress, SglangSettings
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from tests.services.worker.engine.sglang.recordings import event_frames, item
from tests.services.worker.engine.sglang.replaying import Replay, replaying, whole_stream
from tests.support.tiny_models import write_tiny_model

WORKER = Group(0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3", context=4096)


@pytest.fixture
async def server() -> AsyncIterator[Replay]:
    async with replaying() as replay:
        yield replay


@pytest.fixture
def settings(model: Path, server: Replay) -> SglangSettings:
    return SglangSettings(
        model_dir=model,
        servers=(ServerAddress(url=server.url, degree=1),),
        decode=(),
        adaptive=False,
        block_tokens=16,
        blocks_per_rank=300,
        context_tokens_max=4096,
        silence_s=60.0,
        start_limit_s=60.0,
    )


@pytest.fixture
async def engine(settings: SglangSettings) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(settings, SystemClock(), random.Random(1))
    assert not engine.health().ok
    with pytest.raises(EngineError, match="not been started"):
        await engine.adopt(1, (1,))
    await engine.start()
    await engine.adopt(1, (1,))
    yield engine
    await engine.close()


async def prefill(engine: SglangEngine, *items: PrefillItem) -> StepResult:
    return await engine.prefill(PrefillStep(1, WORKER, items))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what was published does not arrive")


def streamed(name: str) -> PrefillItem:
    return item(name, 83, then=Continuation(6, frozenset(), 0))


async def test_a_step_and_what_it_leaves(engine: SglangEngine, server: Replay) -> None:
    noted: list[StepResult] = []
    cold = await engine.prefill(PrefillStep(1, WORKER, (item("a", 83),)), noted.append)
    assert noted == [cold]
    (result,) = cold.items
    assert (result.cached_tokens, result.computed_tokens, result.outcome) == (0, 83, "finished")
    assert (result.stored.first_depth, result.stored.blocks) == (0, 5), "the answer proves it, whatever events say"
    assert 0 < cold.seconds < 60
    (warm,) = (await prefill(engine, item("b", 83))).items
    assert (warm.cached_tokens, warm.computed_tokens, warm.stored.blocks) == (80, 3, 0)
    assert engine.cached_blocks(WORKER, item("c", 83).chain) == 5
    assert engine.resident(WORKER).runs == ((None, item("c", 83).chain),)
    assert server.asked[0]["cache_salt"] == item("a", 83).chain[0].hex()
    assert len({body["rid"] for body in server.asked}) == 2


async def test_tokens_that_were_made_early_wait(engine: SglangEngine) -> None:
    asked = streamed("a")
    (result,) = (await prefill(engine, asked)).items
    assert result.first_token is not None
    with pytest.raises(EngineError, match="was not handed off"):
        await anext(engine.decode(asked.request, 1, 5, frozenset(), Sampling()))
    handed_off = await engine.hand_off(asked.request)
    assert (handed_off.bytes, await engine.hand_off(asked.request)) == (0, handed_off)
    engine.release(asked.request)
    rest = engine.decode(asked.request, result.first_token.token, 5, frozenset(), Sampling())
    assert [result.first_token.token, *[token.token async for token in rest]] == whole_stream()
    with pytest.raises(EngineError, match="no finished prefill"):
        await engine.hand_off(asked.request)


async def test_decode_ends_where_it_is_told_to(engine: SglangEngine) -> None:
    for number, (new_tokens, stop) in enumerate([(2, frozenset[int]()), (5, frozenset({whole_stream()[2]}))]):
        asked = streamed(f"r{number}")
        await prefill(engine, asked)
        await engine.hand_off(asked.request)
        rest = engine.decode(asked.request, whole_stream()[0], new_tokens, stop, Sampling())
        assert [token.token async for token in rest] == whole_stream()[1:3]


async def test_a_stream_that_breaks_gives_what_came_and_an_error(engine: SglangEngine, server: Replay) -> None:
    server.broken_after = 3
    asked = streamed("a")
    await prefill(engine, asked)
    await engine.hand_off(asked.request)
    got: list[int] = []
    tokens = engine.decode(asked.request, whole_stream()[0], 5, frozenset(), Sampling())
    for _ in range(2):
        got.append((await anext(tokens)).token)
    with pytest.raises(EngineError):
        await anext(tokens)
    assert got == whole_stream()[1:3]


async def test_a_share_of_a_prompt_has_no_token_and_leaves_its_blocks(engine: SglangEngine) -> None:
    (share,) = (await prefill(engine, replace(item("a", 83), until=32))).items
    assert (share.outcome, share.first_token, share.stored.blocks) == ("unfinished", None, 2)
    assert engine.cached_blocks(WORKER, item("a", 83).chain) == 2


async def test_events_tell_what_the_pool_did_not_ask_for(engine: SglangEngine, server: Replay) -> None:
    stored, filler, evicting, cleared = event_frames()
    await prefill(engine, item("a", 83))
    for sequence, frames in enumerate((stored, filler, evicting)):
        await server.publish(frames, sequence)
    await until(lambda: engine.cached_blocks(WORKER, item("a", 83).chain) == 0)
    assert (await engine.evict(WORKER, ())).evicted == tuple(reversed(item("a", 83).chain))
    assert (await engine.evict(WORKER, ())).evicted == ()
    await prefill(engine, item("b", 83))
    with pytest.raises(EngineError, match="without the Vertumnus plug-in"):
        await engine.evict(WORKER, item("b", 83).chain)
    await server.publish(cleared, 3)
    await until(lambda: engine.cached_blocks(WORKER, item("b", 83).chain) == 0)


async def test_a_message_that_was_lost_is_sent_again(engine: SglangEngine, server: Replay) -> None:
    stored, filler, evicting, _ = event_frames()
    await prefill(engine, item("a", 83))
    await server.publish(stored, 0)
    unit = engine._fleet.units[0]
    await until(lambda: unit.next_sequence == 1)
    await server.publish(filler, 1, lost=True)
    await server.publish(evicting, 2)
    await until(lambda: unit.next_sequence == 3)
    assert (server.replays, unit.gaps, len(unit.held)) == ([0, 1], 0, 187)


async def test_what_cannot_be_sent_again_is_forgotten(engine: SglangEngine, server: Replay) -> None:
    stored, filler, _, _ = event_frames()
    await prefill(engine, item("a", 83))
    await server.publish(stored, 0)
    unit = engine._fleet.units[0]
    await until(lambda: unit.next_sequence == 1)
    await server.publish(filler, 5, forgotten=True)
    await until(lambda: unit.next_sequence == 6)
    assert (unit.gaps, len(unit.held)) == (1, 187)
    assert len((await engine.evict(WORKER, ())).evicted) == 5


async def test_after_a_message_that_nobody_understands_nothing_is_believed(
    engine: SglangEngine, server: Replay
) -> None:
    """It may have been of removals, and no other may ever come."""
    stored, filler, _, _ = event_frames()
    await server.publish(stored, 0)
    unit = engine._fleet.units[0]
    await until(lambda: len(unit.held) == 5)
    await server.publish([filler[0], filler[1], b"of another version"], 1)
    await until(lambda: not unit.held)
    await server.publish(filler, 2)
    await until(lambda: len(unit.held) == 187)


async def test_who_joins_late_is_told_what_was_published_before(settings: SglangSettings, server: Replay) -> None:
    for sequence, frames in enumerate(event_frames()[:2]):
        await server.publish(frames, sequence)
    late = SglangEngine(settings, SystemClock(), random.Random(1))
    await late.start()
    await late.adopt(1, (1,))
    assert len(late._fleet.units[0].held) == 192
    assert (await prefill(late, item("g", 3000, 1))).items[0].stored.blocks == 187
    await late.close()


async def test_cancelled_requests_leave_their_step(engine: SglangEngine, server: Replay) -> None:
    one, other = item("a", 83), item("b", 83, 5)
    step = asyncio.create_task(prefill(engine, one, other))
    await asyncio.sleep(0)
    engine.cancel(one.request)
    cancelled, done = (await step).items
    assert (cancelled.outcome, done.outcome) == ("cancelled", "finished")
    await until(lambda: any(rid.startswith("a-") for rid in server.aborted))
    engine.cancel(other.request)
    engine.release(one.request)


async def test_a_caller_that_leaves_cancels_its_step(engine: SglangEngine, server: Replay) -> None:
    step = asyncio.create_task(prefill(engine, item("a", 83)))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert (await prefill(engine, item("b", 83, 5))).items[0].outcome == "finished"


async def test_a_server_that_is_lost_ends_its_steps_and_leaves_no_error_unread(engine: SglangEngine) -> None:
    unread: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context["message"]))
    step = asyncio.create_task(prefill(engine, item("a", 83), item("b", 83, 5)))
    await asyncio.sleep(0)
    engine._fleet.lose("it burned")
    (refused,) = await asyncio.gather(step, return_exceptions=True)
    assert str(refused) == "it burned"
    del step, refused  # and with them the last that knows of what they waited for
    await asyncio.sleep(0)
    gc.collect()
    assert unread == []


async def test_what_no_worker_may_ask_is_refused_here(engine: SglangEngine, server: Replay) -> None:
    with pytest.raises(StaleEpoch):
        await engine.prefill(PrefillStep(2, WORKER, (item("a", 83),)))
    with pytest.raises(EngineError, match="not one of the workers"):
        await engine.prefill(PrefillStep(1, Group(0, 2), (item("a", 83),)))
    with pytest.raises(EngineError, match="outside the vocabulary"):
        await prefill(engine, replace(item("a", 83), tokens=item("a", 83).tokens + 5_000))
    with pytest.raises(EngineError, match="until"):
        await prefill(engine, replace(item("a", 83), until=20))
    with pytest.raises(StaleEpoch):
        await engine.adopt(0, (1,))
    with pytest.raises(ValueError, match="covers 2 of 1 ranks"):
        await engine.adopt(2, (1, 1))
    assert server.asked == []
    step = asyncio.create_task(prefill(engine, item("a", 83)))
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await prefill(engine, item("b", 83))
    with pytest.raises(Busy):
        await engine.adopt(2, (1,))
    await step


async def test_servers_of_fixed_degree_say_why_they_stay(settings: SglangSettings) -> None:
    two = replace(
        settings, servers=(ServerAddress(url="http://n:1", degree=2), ServerAddress(url="http://n:2", degree=2))
    )
    engine = SglangEngine(two, SystemClock(), random.Random(1))
    assert (engine.describe().degrees, engine.describe().prefill_ranks, engine.describe().evicts) == ((2,), 4, False)
    with pytest.raises(RolledBack, match=r"\(4,\).*fixed degrees.*\(2, 2\) only"):
        await engine._geometry.adopt((4,))
    assert len(await engine._geometry.adopt((2, 2))) == 4
    await engine.close()


async def test_a_server_that_does_not_fit_is_refused_and_left(settings: SglangSettings) -> None:
    engine = SglangEngine(replace(settings, blocks_per_rank=10_000), SystemClock(), random.Random(1))
    with pytest.raises(EngineError, match="blocks_per_rank says 10000"):
        await engine.start()
    assert not engine.health().ok


async def test_a_server_that_never_answers_is_named(settings: SglangSettings) -> None:
    nobody = replace(settings, servers=(ServerAddress(url="http://127.0.0.1:9", degree=1),), start_limit_s=0.1)
    with pytest.raises(EngineError, match=r"^sglang_start_s: .*127\.0\.0\.1:9 does not answer .* for 0\.1 s"):
        await SglangEngine(nobody, SystemClock(), random.Random(1)).start()


async def test_a_server_that_was_restarted_is_another_one(engine: SglangEngine, server: Replay) -> None:
    server.well = False
    await until(lambda: False in server.probed)  # one of the five that are believed
    server.boot, server.well = 1.0, True
    assert "was restarted" in await asyncio.wait_for(engine.wait_died(), 60)
    with pytest.raises(EngineDied):
        await prefill(engine, item("a", 83))


async def test_one_that_is_restarted_while_another_is_waited_for_is_not_the_one_that_was_joined(
    settings: SglangSettings, server: Replay
) -> None:
    async with replaying() as late:
        late.well = False
        addresses = tuple(ServerAddress(url=each.url, degree=1) for each in (server, late))
        engine = SglangEngine(replace(settings, servers=addresses), SystemClock(), random.Random(1))
        starting = asyncio.create_task(engine.start())
        await until(lambda: bool(late.probed))
        server.boot, late.well = 1.0, True
        await starting
        assert f"{server.url} was restarted" in await asyncio.wait_for(engine.wait_died(), 60)
        await engine.close()


async def test_a_publisher_that_counts_anew_is_another_server_s(engine: SglangEngine, server: Replay) -> None:
    frames = event_frames()[0]
    unit = engine._fleet.units[0]
    for sequence in range(3):
        await server.publish(frames, sequence)
    await until(lambda: unit.next_sequence == 3)
    await server.publish(frames, 1)  # its first message came before the subscription was back
    assert "was restarted" in await asyncio.wait_for(engine.wait_died(), 60)


async def test_what_comes_by_replay_and_again_by_itself_is_no_other_life(
    settings: SglangSettings, server: Replay
) -> None:
    stored, filler, evicting, _ = event_frames()
    for sequence, frames in enumerate((stored, filler)):
        await server.publish(frames, sequence, lost=True)
    engine = SglangEngine(settings, SystemClock(), random.Random(1))
    await engine.start()
    unit = engine._fleet.units[0]
    assert unit.next_sequence == 2
    for sequence, frames in enumerate((stored, filler, evicting)):
        await server.publish(frames, sequence)
    await until(lambda: unit.next_sequence == 3)
    answered = len(server.probed)
    await until(lambda: len(server.probed) > answered + 1)
    assert engine.health().ok
    await engine.close()


async def test_events_that_cannot_be_followed_end_the_start(settings: SglangSettings, server: Replay) -> None:
    server.events_host, server.told = "no host", {"kv_events_config": '{"bind": true}'}
    engine = SglangEngine(settings, SystemClock(), random.Random(1))
    with pytest.raises(EngineDied, match="ZMQError"):
        await asyncio.wait_for(engine.start(), 60)


async def test_events_that_nobody_publishes_there_end_the_start(settings: SglangSettings, server: Replay) -> None:
    """A firewall, say: pages would be believed in that have gone."""
    server.events_host, server.told = "127.0.0.2", {"kv_events_config": '{"bind": true}'}
    engine = SglangEngine(replace(settings, start_limit_s=1.0), SystemClock(), random.Random(1))
    with pytest.raises(EngineError, match=r"no KV events can be had from tcp://127\.0\.0\.2:\d+ for 1 s"):
        await asyncio.wait_for(engine.start(), 60)


async def test_a_full_queue_refuses_a_request_and_loses_no_server(engine: SglangEngine, server: Replay) -> None:
    server.full = True
    with pytest.raises(EngineError, match=r"503: .*queue is full") as refused:
        await prefill(engine, item("a", 83))
    assert not isinstance(refused.value, EngineDied)
    server.full = False
    assert (await prefill(engine, item("a", 83))).items[0].outcome == "finished"


def test_a_key_is_in_no_text(settings: SglangSettings) -> None:
    assert "secret" not in repr(replace(settings, key="secret"))


async def test_a_closed_engine_has_died(engine: SglangEngine) -> None:
    waiting = asyncio.create_task(engine.wait_died())
    asked = streamed("a")
    await prefill(engine, asked)
    await engine.hand_off(asked.request)
    await engine.close()
    await engine.close()
    assert await waiting == "the engine was closed"
    assert engine.health().detail == "the engine was closed"
    for refused in (prefill(engine, item("b", 83)), engine.adopt(9, (1,)), engine.evict(WORKER, ())):
        with pytest.raises(EngineDied):
            await refused
