"""An unmodified SGLang server as a worker: prefill, decode, cancel, cache events, refusals, restarts.

The tests of one module share a server, and each starts from an empty cache."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.worker.engine.continuation import Continuation
from services.worker.engine.copy_plan import CopyPlan
from services.worker.engine.protocol import (
    Busy,
    EngineDied,
    EngineError,
    PrefillStep,
    Sampling,
    StaleEpoch,
)
from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.health import Vitals
from services.worker.engine.sglang.page_hashes import page_hashes, salt_of
from services.worker.engine.sglang.settings import SglangSettings
from services.worker.engine.sglang.subscription import EventStream
from shared.contracts.ids import NodeId
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from tests.sglang.adapter_requests import (
    ON_REAL_SERVERS,
    WORKER,
    generate,
    item,
    one,
    prefill,
    prompt,
    settings_for,
)
from tests.support.adapter_servers import PAGE_TOKENS, START_LIMIT_S, Running, to_launch, wait_running

pytestmark = ON_REAL_SERVERS

DEADLINE_S = 120


@pytest.fixture
async def new_engine(model: Path, fixed_server: Running) -> AsyncIterator[Callable[[], SglangEngine]]:
    async with httpx.AsyncClient(base_url=fixed_server.url) as http:
        (await http.post("/flush_cache?timeout=30", timeout=60)).raise_for_status()
    made: list[SglangEngine] = []

    def make() -> SglangEngine:
        made.append(SglangEngine(settings_for(model, fixed_server), SystemClock(), random.SystemRandom()))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


@pytest.fixture
async def engine(new_engine: Callable[[], SglangEngine]) -> AsyncIterator[SglangEngine]:
    engine = new_engine()
    await engine.start()
    await engine.adopt(1, (1,))
    async with asyncio.timeout(DEADLINE_S):
        yield engine


async def test_a_request_s_whole_life(engine: SglangEngine) -> None:
    tokens = prompt(83, 1)
    cold = await one(engine, item("cold", tokens))
    assert (cold.cached_tokens, cold.computed_tokens, cold.stored.blocks) == (0, 83, 5)
    warm = await one(engine, item("warm", tokens))
    assert (warm.cached_tokens, warm.computed_tokens, warm.stored.blocks) == (80, 3, 0)
    assert warm.first_token == cold.first_token
    answer = await generate(engine, item("whole", tokens, new_tokens=8))
    assert len(answer) == 8
    stopping = item("stops", tokens, new_tokens=8)
    stop = answer[3]
    stopping = replace(stopping, then=Continuation(8, frozenset({stop}), 0))
    assert await generate(engine, stopping) == answer[: answer.index(stop) + 1]


async def test_the_step_takes_what_the_server_says(engine: SglangEngine) -> None:
    began = asyncio.get_running_loop().time()
    result = await prefill(engine, item("a", prompt(900, 2)), item("b", prompt(900, 3)))
    assert 0 < result.seconds <= asyncio.get_running_loop().time() - began


async def test_a_prompt_in_chunks_ends_as_a_whole_one_does(engine: SglangEngine) -> None:
    whole = item("chunks", prompt(100, 4))
    first = await one(engine, replace(whole, until=32))
    second = await one(engine, replace(whole, until=64))
    last = await one(engine, whole)
    assert [each.outcome for each in (first, second, last)] == ["unfinished", "unfinished", "finished"]
    assert [(each.cached_tokens, each.computed_tokens) for each in (first, second, last)] == [
        (0, 32),
        (32, 32),
        (64, 36),
    ]
    assert [each.stored.blocks for each in (first, second, last)] == [2, 2, 2]
    assert (await one(engine, item("again", whole.tokens))).first_token == last.first_token


async def test_equal_prompts_of_two_tenants_find_nothing_of_each_other(engine: SglangEngine) -> None:
    tokens = prompt(64, 5)
    mine, other = item("mine", tokens), item("theirs", tokens, key=b"x" * 32)
    await one(engine, mine)
    assert (await one(engine, other)).cached_tokens == 0
    assert (await one(engine, item("mine again", tokens))).cached_tokens == 48
    assert len(engine.resident(WORKER).runs) == 2


async def test_what_is_pushed_out_is_told_children_first(engine: SglangEngine) -> None:
    old = item("old", prompt(160, 6))
    assert (await one(engine, old)).stored.blocks == 10
    evicted: tuple[bytes, ...] = ()
    for number in range(3):
        evicted += (await prefill(engine, item(f"filler {number}", prompt(3_000, 10 + number)))).evicted
    for _ in range(100):
        if engine.cached_blocks(WORKER, old.chain) == 0:
            break
        await asyncio.sleep(0.05)
    evicted += (await engine.evict(WORKER, ())).evicted
    assert [block for block in evicted if block in old.chain] == list(reversed(old.chain))
    held = {block for _, run in engine.resident(WORKER).runs for block in run}
    assert not held & set(evicted)


async def test_a_cancelled_request_leaves_the_others(engine: SglangEngine) -> None:
    long, short = item("long", prompt(4_000, 20)), item("short", prompt(40, 21))
    running = asyncio.create_task(prefill(engine, long, short))
    await asyncio.sleep(0.05)
    engine.cancel(long.request)
    cancelled, done = (await running).items
    assert (cancelled.outcome, cancelled.first_token, done.outcome) == ("cancelled", None, "finished")
    with pytest.raises(EngineError):
        await engine.hand_off(long.request)
    await one(engine, item("after", prompt(40, 22)))


async def test_a_stream_that_nobody_wants_ends_at_the_server(engine: SglangEngine, fixed_server: Running) -> None:
    endless = item("endless", prompt(40, 23), new_tokens=3_000)
    await one(engine, endless)
    await engine.hand_off(endless.request)
    await asyncio.to_thread(wait_running, [fixed_server], [1])
    engine.cancel(endless.request)
    await asyncio.to_thread(wait_running, [fixed_server], [0])


async def test_what_may_not_be_asked_is_refused_before_the_server_hears_of_it(engine: SglangEngine) -> None:
    with pytest.raises(StaleEpoch):
        await engine.prefill(PrefillStep(2, WORKER, (item("a", prompt(10, 1)),)))
    with pytest.raises(EngineError, match="not one of the workers"):
        await engine.prefill(PrefillStep(1, Group(0, 2), (item("a", prompt(10, 1)),)))
    with pytest.raises(EngineError, match="outside the vocabulary"):
        await one(engine, item("strange", prompt(10, 1) + 5_000))
    with pytest.raises(EngineError, match="a prompt has 1 to"):
        await one(engine, item("long", prompt(4_095, 1)))
    running = asyncio.create_task(one(engine, item("a", prompt(2_000, 24))))
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await one(engine, item("b", prompt(10, 1)))
    await running
    await one(engine, item("well", prompt(10, 1)))


async def test_an_adapter_that_joins_a_warm_server_knows_its_pages(
    engine: SglangEngine, new_engine: Callable[[], SglangEngine]
) -> None:
    known = item("known", prompt(83, 30))
    await one(engine, known)
    late = new_engine()
    await late.start()
    await late.adopt(1, (1,))
    assert late.resident(WORKER).runs == (), "nobody has named them yet"
    longer = item("longer", np.concatenate([known.tokens[:80], prompt(40, 31)]))
    result = await one(late, longer)
    assert (result.cached_tokens, result.stored.first_depth, result.stored.blocks) == (80, 0, 7)


async def test_an_event_that_was_lost_on_the_way_is_sent_again_by_the_server(
    engine: SglangEngine, new_engine: Callable[[], SglangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another adapter's prefills, of whose pages this one learns by events alone."""
    other, unit, take = new_engine(), engine._fleet.units[0], EventStream._take
    await other.start()
    await other.adopt(1, (1,))
    lost: list[list[bytes]] = []

    async def lossy(stream: EventStream, frames: list[bytes]) -> None:
        if stream._cache is unit and not lost:
            lost.append(frames)
        else:
            await take(stream, frames)

    monkeypatch.setattr(EventStream, "_take", lossy)
    theirs = [item(f"theirs {number}", prompt(83, 33 + number)) for number in range(4)]
    for each in theirs:
        await one(other, each)
    # SGLang may publish what a request leaves with the batch after it, so nobody knows of the last one's pages yet.
    early = [
        page
        for each in theirs[:-1]
        for page in page_hashes(each.tokens, PAGE_TOKENS, salt_of(each.request, each.chain))
    ]
    async with asyncio.timeout(DEADLINE_S), engine._changed:
        await engine._changed.wait_for(lambda: unit.held.issuperset(early))
    assert (len(lost), unit.gaps) == (1, 0)


async def test_a_prefix_is_replicated_by_computing_it_anew(
    engine: SglangEngine, new_engine: Callable[[], SglangEngine], fixed_server: Running
) -> None:
    """The other node is a second adapter of the same server, whose cache is flushed in between."""
    known = item("known", prompt(83, 32))
    await one(engine, known)
    lent = await engine.pin("lease", known.chain)
    async with httpx.AsyncClient(base_url=fixed_server.url) as http:
        (await http.post("/flush_cache?timeout=30", timeout=60)).raise_for_status()
    other = new_engine()
    await other.start()
    await other.adopt(1, (1,))
    sources = tuple(replace(each, node=NodeId("source")) for each in lent.sources if each is not None)
    plan = CopyPlan("copy", 1, WORKER, None, known.chain, sources, 60.0, {NodeId("source"): lent.access})
    copied = await other.copy_blocks(plan)
    assert (copied.blocks, copied.failure, copied.detail) == (known.chain, None, "recomputed")
    assert (await one(other, item("warm", known.tokens))).cached_tokens == 80


async def test_a_server_of_another_kind_is_refused_with_every_reason(model: Path, fixed_server: Running) -> None:
    asked = replace(settings_for(model, fixed_server), blocks_per_rank=10_000, block_tokens=32)
    engine = SglangEngine(asked, SystemClock(), random.SystemRandom())
    with pytest.raises(EngineError) as refused:
        await engine.start()
    for words in ("page_size: 16, but block_tokens is 32", "blocks_per_rank says 10000", "kv_events.block_size"):
        assert words in str(refused.value)


async def test_a_server_that_dies_ends_the_engine_that_launched_it_and_everything_on_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that its scheduler is stopped, for a second adapter: the port is open, and nothing runs."""
    running, command = to_launch(model)
    settings = replace(settings_for(model, running), launch=command, start_limit_s=START_LIMIT_S)
    engine = SglangEngine(settings, SystemClock(), random.SystemRandom())
    try:
        await engine.start()
        await engine.adopt(1, (1,))
        assert engine._fleet._process is not None
        server = engine._fleet._process._process
        assert server is not None
        await hangs(replace(settings, launch=None, silence_s=5.0), scheduler_of(server.pid), monkeypatch)
        streaming, running_long = item("streaming", prompt(40, 40), new_tokens=3_000), item("long", prompt(4_000, 41))
        first = await one(engine, streaming)
        assert first.first_token is not None
        await engine.hand_off(streaming.request)
        tokens = engine.decode(streaming.request, first.first_token.token, 2_999, frozenset(), Sampling())
        await anext(tokens)
        step = asyncio.create_task(one(engine, running_long))
        await asyncio.sleep(0.05)
        os.killpg(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(engine.wait_died(), 60)
        with pytest.raises(EngineDied):
            await step
        with pytest.raises(EngineError):
            async for _ in tokens:
                pass
        assert not engine.health().ok
    finally:
        await engine.close()
    assert server.returncode == -signal.SIGKILL


async def hangs(settings: SglangSettings, scheduler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that has heard of the scheduler's load gives the server up when it hears no more."""
    heard, hear = asyncio.Event(), Vitals.heard

    def hearing(vitals: Vitals, rank: int, now_ns: int) -> None:
        hear(vitals, rank, now_ns)
        if vitals.silence_ns == settings.silence_s * 1e9:
            heard.set()

    monkeypatch.setattr(Vitals, "heard", hearing)
    impatient = SglangEngine(settings, SystemClock(), random.SystemRandom())
    await impatient.start()
    await asyncio.wait_for(heard.wait(), DEADLINE_S)
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert "has not run for" in await asyncio.wait_for(impatient.wait_died(), DEADLINE_S)
    finally:
        os.kill(scheduler, signal.SIGCONT)
        await impatient.close()


def scheduler_of(server: int) -> int:
    """The process of the server's one scheduler."""
    children = Path(f"/proc/{server}/task").glob("*/children")
    pids = [int(pid) for each in children for pid in each.read_text().split()]
    (found,) = [pid for pid in pids if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found
