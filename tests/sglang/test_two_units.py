"""Two units: the smallest server that can split and merge."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from services.worker.engine.protocol import EngineDied, EngineError, PrefillStep
from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.verbs import Limits, Verbs, switch
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from tests.sglang.adapter_requests import ON_REAL_SERVERS, item, prompt, settings_for
from tests.sglang.chain import switched
from tests.sglang.traffic import random_prompt
from tests.support.adapter_servers import PAGE_TOKENS, Running
from tests.support.switching_servers import client, generate, wait_ended

pytestmark = ON_REAL_SERVERS

EPOCHS = count(1_000)
"""Above those of the engines that had the server before (`test_adapter_switching.py`)."""


@pytest.fixture
async def http(two_units: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with client(two_units.url) as http:
        yield http


@pytest.fixture
async def reference(fixed_server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with client(fixed_server.url) as http:
        yield http


async def test_tokens_are_those_of_one_fixed_server(http: httpx.AsyncClient, reference: httpx.AsyncClient) -> None:
    verbs = Verbs(http, 2)
    prompts = [random_prompt(37, 1), random_prompt(300, 2), random_prompt(2400, 3)]
    expected = [(await generate(reference, each))[0] for each in prompts]
    for composition in ((1, 1), (2,), (1, 1), (2,)):
        if composition != await verbs.composition():
            await switched(verbs, EPOCHS, composition)
        for unit in (0, 1):
            got = [(await generate(http, each, routed_dp_rank=unit))[0] for each in prompts]
            assert got == expected, (composition, unit)
    states = await verbs.states()
    assert states[0].digest == states[1].digest
    assert states[0].steps > 0


async def test_a_merge_keeps_what_both_have_and_a_split_everything(http: httpx.AsyncClient) -> None:
    verbs = Verbs(http, 2)
    await switched(verbs, EPOCHS, (1, 1))
    both, only_one = random_prompt(1600, 10), random_prompt(800, 11)
    for unit in (0, 1):
        await generate(http, both, routed_dp_rank=unit)
    await generate(http, only_one, routed_dp_rank=1)
    await switched(verbs, EPOCHS, (2,))
    assert (await generate(http, both))[1] == 1600 - PAGE_TOKENS
    assert (await generate(http, only_one))[1] == 0
    merged = random_prompt(500, 12)
    await generate(http, merged)
    await switched(verbs, EPOCHS, (1, 1))
    for unit in (0, 1):
        assert (await generate(http, merged, routed_dp_rank=unit))[1] >= 480


async def test_an_epoch_is_used_once_and_they_rise(http: httpx.AsyncClient) -> None:
    verbs = Verbs(http, 2)
    before = await verbs.composition()
    other = (1, 1) if before == (2,) else (2,)
    used = next(EPOCHS)
    assert await verbs.prepare(used, before, 60.0)
    assert await verbs.release(used)
    assert not await verbs.prepare(used, other, 60.0)
    assert not await verbs.commit(used, other, 30.0)
    assert not await verbs.prepare(used - 1, other, 60.0)
    assert not await verbs.commit(next(EPOCHS), other, 30.0), "never prepared"
    assert await verbs.composition() == before
    assert not (await switch(verbs, used, other, Limits(drain_s=0.2), SystemClock())).made


async def test_a_late_release_is_not_the_next_epoch_s(http: httpx.AsyncClient) -> None:
    """Of a client that was given up, say."""
    verbs = Verbs(http, 2)
    other = (1, 1) if await verbs.composition() == (2,) else (2,)
    late, newer = next(EPOCHS), next(EPOCHS)
    assert await verbs.prepare(late, other, 60.0)
    assert await verbs.prepare(newer, other, 60.0)
    await verbs.release(late)
    assert await verbs.commit(newer, other, 30.0)
    await verbs.release(newer)
    assert await verbs.composition() == other


async def test_an_eviction_of_an_unknown_block_takes_nothing(http: httpx.AsyncClient) -> None:
    assert not await Verbs(http, 2).evict(Group(0, 1), [12345])


async def test_a_follower_that_dies_ends_the_server_and_the_engine_on_it(model: Path, two_units: Running) -> None:
    """The last test of the module: it takes the server with it."""
    engine = SglangEngine(settings_for(model, two_units, 2), SystemClock(), random.SystemRandom())
    try:
        await engine.start()
        await engine.adopt(1, (2,))
        pids = next(iter(engine._fleet._pids.values()))
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
        assert await asyncio.wait_for(engine.wait_died(), 300)
        with pytest.raises((EngineDied, EngineError)):
            await engine.prefill(PrefillStep(1, Group(0, 2), (item("late", prompt(40, 22)),)))
    finally:
        await engine.close()
    wait_ended(two_units)
