"""How a decode server takes part, when it is given up, and when the engine with it: on local servers (`replaying`)."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import EngineDied, EngineError, PrefillStep
from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.facts import Facts
from services.worker.engine.sglang.fleet import Fleet
from services.worker.engine.sglang.health import UNANSWERED_MAX
from services.worker.engine.sglang.settings import DecodeAddress, ServerAddress, SglangSettings
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from tests.services.worker.engine.sglang.recordings import facts_told, item
from tests.services.worker.engine.sglang.replaying import Replay, replaying
from tests.support.tiny_models import write_tiny_model


class Beats(SystemClock):
    """Whoever sleeps is woken by a beat."""

    def __init__(self) -> None:
        self.beats = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        await self.beats.acquire()


class Hurried(SystemClock):
    """Probes follow one another."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.01))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what is waited for does not come")


class Watched:
    """An only decode server."""

    def __init__(self, fleet: Fleet, clock: Beats, server: Replay) -> None:
        self.fleet, self.server = fleet, server
        self._clock, self._gone = clock, set[int]()
        fleet.spawn(fleet._watch_decode(0, fleet.decode[0], self._gone))

    async def probe(self, *, well: bool) -> None:
        """One of it, to its end."""
        self.server.well, before = well, len(self.server.probed)
        self._clock.beats.release()
        await until(lambda: len(self.server.probed) > before and self.fleet.down[0] != well)


def settings_of(model: Path, decode: Replay, prefill_url: str, context_tokens: int) -> SglangSettings:
    """One prefill server and one that decodes for it."""
    return SglangSettings(
        model_dir=model,
        servers=(ServerAddress(url=prefill_url, degree=1, bootstrap_port=8998),),
        decode=(DecodeAddress(url=decode.url),),
        adaptive=False,
        block_tokens=16,
        blocks_per_rank=300,
        context_tokens_max=context_tokens,
        silence_s=60.0,
        start_limit_s=60.0,
    )


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    model = write_tiny_model(tmp_path / "tiny-qwen3", "qwen3")
    async with replaying() as server:
        server.mode = "decode"
        clock = Beats()
        engine = SglangEngine(settings_of(model, server, "http://n:1", 512), clock, random.Random(1))
        yield Watched(engine._fleet, clock, server)
        await engine.close()


async def test_a_prefill_and_its_decode_meet_in_a_room_of_their_own(tmp_path: Path) -> None:
    """What somebody decodes, a chunk, and a prefix for its blocks alone: a server keeps no page that goes nowhere."""
    model = write_tiny_model(tmp_path / "tiny-qwen3", "qwen3", context=4096)
    async with replaying() as prefill, replaying() as decode:
        prefill.mode, decode.mode = "prefill", "decode"
        engine = SglangEngine(settings_of(model, decode, prefill.url, 4_096), SystemClock(), random.Random(1))
        await engine.start()
        await engine.adopt(1, (1,))
        then = Continuation(6, frozenset(), 0)
        asked = (item("whole", 83, then=then), item("cut", 83, then=then, until=32), item("alone", 83))
        for each in asked:
            await engine.prefill(PrefillStep(1, Group(0, 1), (each,)))
        for each, there, here in zip(asked, prefill.asked, decode.asked, strict=True):
            assert here["rid"] == there["rid"]
            assert here["rid"].startswith(f"{each.request}-")
            assert (here["bootstrap_host"].partition("@")[2], here["bootstrap_port"]) == ("127.0.0.1", 8998)
            assert here["bootstrap_room"] == there["bootstrap_room"]
            assert (there["stream"], here["stream"]) == (False, True)
            assert len(there["input_ids"]) == len(here["input_ids"]) == (each.until or 83)
        assert [each["sampling_params"]["max_new_tokens"] for each in decode.asked] == [6, 1, 1]
        assert len({each["bootstrap_room"] for each in decode.asked}) == 3
        assert (await engine.hand_off(asked[0].request)).bytes > 0
        for each in asked[1:]:
            with pytest.raises(EngineError):
                await engine.hand_off(each.request)
        await engine.close()


async def test_each_life_of_a_prefill_server_is_met_at_an_address_of_its_own(tmp_path: Path) -> None:
    """And each life of an agent at the same: a decode server asks every address that it knows for its health, for ever."""
    model = write_tiny_model(tmp_path / "tiny-qwen3", "qwen3", context=4096)
    async with replaying() as prefill, replaying() as decode:
        prefill.mode, decode.mode = "prefill", "decode"
        for boot in (0.0, 0.0, 1.0):
            prefill.boot = boot
            engine = SglangEngine(settings_of(model, decode, prefill.url, 4_096), SystemClock(), random.Random(1))
            await engine.start()
            await engine.adopt(1, (1,))
            await engine.prefill(PrefillStep(1, Group(0, 1), (item("alone", 83),)))
            await engine.close()
        first, same, other = (each["bootstrap_host"] for each in decode.asked)
        assert (first == same, first == other) == (True, False)


@pytest.mark.parametrize("beside", [False, True])
async def test_no_prefill_waits_for_a_decode_server_that_is_given_up(tmp_path: Path, *, beside: bool) -> None:
    """A step's, and one for its blocks alone `beside` the steps: the prefill server is told, and the engine lives on."""
    model = write_tiny_model(tmp_path / "tiny-qwen3", "qwen3", context=4096)
    async with replaying() as prefill, replaying() as one, replaying() as other:
        prefill.mode, one.mode, other.mode = "prefill", "decode", "decode"
        prefill.hanging = one.hanging = other.hanging = True
        settings = replace(
            settings_of(model, one, prefill.url, 4_096),
            decode=(DecodeAddress(url=one.url), DecodeAddress(url=other.url)),
        )
        engine = SglangEngine(settings, Hurried(), random.Random(1))
        await engine.start()
        await engine.adopt(1, (1,))
        step = PrefillStep(1, Group(0, 1), (item("whole", 83, then=Continuation(6, frozenset(), 0)),))
        running = asyncio.ensure_future(
            engine._prefills.compute(item("alone", 83), Group(0, 1)) if beside else engine.prefill(step)
        )
        await until(lambda: bool(prefill.asked and (one.asked or other.asked)))
        (one if one.asked else other).well = False
        with pytest.raises(EngineError) as raised:
            await asyncio.wait_for(running, 30)
        assert not isinstance(raised.value, EngineDied)
        assert engine.health().ok
        await until(lambda: bool(prefill.aborted))
        assert prefill.aborted == [prefill.asked[0]["rid"]]
        await engine.close()


async def test_what_nobody_decodes_goes_to_every_decode_server(tmp_path: Path) -> None:
    """Whichever unit prefills; and no name begins with another one, as SGLang aborts by the beginning of names."""
    model = write_tiny_model(tmp_path / "tiny-qwen3", "qwen3", context=4096)
    async with replaying() as prefill, replaying() as one, replaying() as other:
        settings = replace(
            settings_of(model, one, prefill.url, 4_096),
            servers=(ServerAddress(url=prefill.url, degree=4, bootstrap_port=8998),),
            decode=(DecodeAddress(url=one.url), DecodeAddress(url=other.url)),
            adaptive=True,
        )
        engine = SglangEngine(settings, SystemClock(), random.Random(1))
        engine._fleet.facts = {
            server: Facts.model_validate(facts_told()) for server in (*engine._fleet.servers, *engine._fleet.decode)
        }
        for _ in range(12):
            await engine._prefills._generations.begin(item("alone", 83), Group(2, 1), []).task
        assert {each["bootstrap_room"] % 4 for each in prefill.asked} == {2}
        assert one.asked
        assert other.asked
        names = [each["rid"] for each in prefill.asked]
        assert [name for name in names if any(each.startswith(name) for each in names if each != name)] == []
        await engine.close()


async def test_an_only_decode_server_may_miss_a_probe(watched: Watched) -> None:
    for _ in range(UNANSWERED_MAX - 1):
        await watched.probe(well=False)
    assert not watched.fleet.lost.done()
    await watched.probe(well=True)
    await watched.probe(well=False)
    assert not watched.fleet.lost.done()


async def test_the_engine_ends_with_the_last_one_that_is_given_up(watched: Watched) -> None:
    for _ in range(UNANSWERED_MAX):
        await watched.probe(well=False)
    assert "no decode server answers" in await asyncio.wait_for(watched.fleet.lost, 30)


async def test_one_that_comes_back_as_another_gets_nothing(watched: Watched) -> None:
    """Of another page size or model it would answer all the same, and wrongly."""
    await watched.probe(well=False)
    watched.server.mode = "null"
    watched.server.well = True
    for _ in range(UNANSWERED_MAX - 1):
        watched._clock.beats.release()
    reason = await asyncio.wait_for(watched.fleet.lost, 30)
    assert "disaggregation_mode: 'null'; needed: 'decode'" in reason
    assert watched.fleet.down == [True]


async def test_one_that_comes_back_is_read_as_it_streams_now(watched: Watched) -> None:
    await watched.probe(well=False)
    watched.server.told = {"incremental_streaming_output": True}
    await watched.probe(well=True)
    assert watched.fleet.facts[watched.fleet.decode[0]].incremental_streaming_output
