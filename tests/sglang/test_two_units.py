"""Two units: the smallest server that can split and merge."""

import random
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from services.worker.engine.sglang.verbs import Limits, Verbs, switch
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from tests.support.sglang_servers import PAGE, SglangServer, generate

LIMITS = Limits(drain_s=120.0, vote_s=30.0, lease_s=60.0)


@pytest.fixture(scope="module")
def server(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with SglangServer(qwen3, tmp_path_factory.mktemp("two") / "log", units=2) as server:
        yield server


@pytest.fixture
async def http(server: SglangServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as client:
        yield client


@pytest.fixture
async def reference(plain: SglangServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=plain.url, timeout=300.0) as client:
        yield client


EPOCHS = count(1)


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


async def test_tokens_are_those_of_one_fixed_server(http: httpx.AsyncClient, reference: httpx.AsyncClient) -> None:
    verbs = Verbs(http, 2)
    prompts = [prompt(37, 1), prompt(300, 2), prompt(2400, 3)]
    expected = [(await generate(reference, each))[0] for each in prompts]
    for composition in ((1, 1), (2,), (1, 1), (2,)):
        if composition != await verbs.composition():
            result = await switch(verbs, next(EPOCHS), composition, LIMITS, SystemClock())
            assert (result.made, result.composition) == (True, composition), result
        for unit in (0, 1):
            got = [(await generate(http, each, routed_dp_rank=unit))[0] for each in prompts]
            assert got == expected, (composition, unit)
    states = await verbs.states()
    assert states[0].digest == states[1].digest
    assert states[0].steps > 0


async def test_a_merge_keeps_what_both_have_and_a_split_everything(http: httpx.AsyncClient) -> None:
    verbs = Verbs(http, 2)
    await switch(verbs, next(EPOCHS), (1, 1), LIMITS, SystemClock())
    both, only_one = prompt(1600, 10), prompt(800, 11)
    for unit in (0, 1):
        await generate(http, both, routed_dp_rank=unit)
    await generate(http, only_one, routed_dp_rank=1)
    await switch(verbs, next(EPOCHS), (2,), LIMITS, SystemClock())
    assert (await generate(http, both))[1] == 1600 - PAGE
    assert (await generate(http, only_one))[1] == 0
    merged = prompt(500, 12)
    await generate(http, merged)
    await switch(verbs, next(EPOCHS), (1, 1), LIMITS, SystemClock())
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


async def test_an_eviction_of_an_unknown_block_takes_nothing(http: httpx.AsyncClient) -> None:
    assert not await Verbs(http, 2).evict(Group(0, 1), [12345])
