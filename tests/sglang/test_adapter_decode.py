"""Prefill and decode on different SGLang servers, over the real transfer engine."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from services.worker.engine.protocol import EngineError, PrefillStep, Sampling
from services.worker.engine.sglang.engine import SglangEngine
from shared.runtime.clock import SystemClock
from tests.sglang.adapter_requests import ON_REAL_SERVERS, WORKER, generate, item, one, prompt, settings_for
from tests.support.adapter_servers import DECODE, NOTICES_NO_RESTART, PREFILL, Running, launched, wait_up

pytestmark = ON_REAL_SERVERS

DEADLINE_S = 300


class Servers(NamedTuple):
    """`again` starts another prefill server in the place of one that has ended."""

    prefill: Running
    decode: Running
    again: Callable[[], Running]


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The decode server notices no restart of the other one."""
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        prefill = stack.enter_context(launched(model, logs / "prefill", *PREFILL))
        decode = stack.enter_context(launched(model, logs / "decode", *DECODE, environment=NOTICES_NO_RESTART))
        port = urlsplit(prefill.url).port
        again = launched(model, logs / "again", *PREFILL, port=port)
        wait_up(prefill, decode)
        yield Servers(prefill, decode, lambda: stack.enter_context(again))


@pytest.fixture
async def engine(model: Path, servers: Servers) -> AsyncIterator[SglangEngine]:
    settings = settings_for(model, servers.prefill, decode=(servers.decode,))
    engine = SglangEngine(settings, SystemClock(), random.SystemRandom())
    await engine.start()
    await engine.adopt(1, (1,))
    async with asyncio.timeout(DEADLINE_S):
        yield engine
    await engine.close()


async def test_a_request_is_decoded_elsewhere_and_its_prefix_found_again(engine: SglangEngine) -> None:
    tokens = prompt(83, 1)
    cold = await generate(engine, item("cold", tokens, new_tokens=8))
    warm = await generate(engine, item("warm", tokens, new_tokens=8))
    assert cold == warm
    assert len(cold) == 8
    again = await one(engine, item("again", tokens, new_tokens=8))
    assert (again.cached_tokens, again.stored.blocks) == (80, 0)
    handed_off = await engine.hand_off(again.request)
    assert handed_off.bytes == 83 * engine.describe().kv_bytes_per_token
    assert await engine.hand_off(again.request) == handed_off


async def test_what_nobody_decodes_is_kept_as_well(engine: SglangEngine) -> None:
    """A prefix that is replicated, and each chunk of a prompt."""
    alone = item("alone", prompt(83, 2))
    result = await one(engine, alone)
    assert (result.computed_tokens, result.stored.blocks) == (83, 5)
    assert result.first_token is not None
    with pytest.raises(EngineError):
        await engine.hand_off(result.request)
    assert (await one(engine, item("again", alone.tokens))).cached_tokens == 80
    cut = item("cut", prompt(100, 3), new_tokens=8)
    chunks = [await one(engine, replace(cut, until=until)) for until in (32, 64)]
    assert [(each.cached_tokens, each.computed_tokens, each.stored.blocks) for each in chunks] == [
        (0, 32, 2),
        (32, 32, 2),
    ]
    assert (await one(engine, cut)).cached_tokens == 64
    await engine.hand_off(cut.request)
    engine.cancel(cut.request)


async def test_requests_of_a_step_go_over_side_by_side(engine: SglangEngine) -> None:
    items = [item(f"r{number}", prompt(40 + number, 10 + number), new_tokens=4) for number in range(4)]
    alone = [await generate(engine, item(f"a{number}", each.tokens, new_tokens=4)) for number, each in enumerate(items)]
    results = (await engine.prefill(PrefillStep(1, WORKER, tuple(items)))).items
    for each, result, expected in zip(items, results, alone, strict=True):
        assert result.first_token is not None
        await engine.hand_off(each.request)
        rest = engine.decode(each.request, result.first_token.token, 3, frozenset(), Sampling())
        assert [result.first_token.token, *[token.token async for token in rest]] == expected


async def test_a_prefill_server_that_comes_back_is_met_by_who_has_not_noticed(
    model: Path, engine: SglangEngine, servers: Servers
) -> None:
    """At the address that it had, with other ports of its ranks."""
    expected = await generate(engine, item("before", prompt(40, 20), new_tokens=4))
    os.killpg(servers.prefill.pid, signal.SIGKILL)
    await engine.wait_died()
    wait_up(again := servers.again())
    life = SglangEngine(settings_for(model, again, decode=(servers.decode,)), SystemClock(), random.SystemRandom())
    await life.start()
    await life.adopt(1, (1,))
    assert await generate(life, item("after", prompt(40, 20), new_tokens=4)) == expected
    await life.close()


async def test_a_decode_server_that_dies_breaks_its_stream_off(engine: SglangEngine, servers: Servers) -> None:
    """The last test of the module: it takes the decode server with it. With no other one left, the engine ends."""
    endless = item("endless", prompt(40, 30), new_tokens=3_000)
    first = await one(engine, endless)
    assert first.first_token is not None
    await engine.hand_off(endless.request)
    tokens = engine.decode(endless.request, first.first_token.token, 2_999, frozenset(), Sampling())
    await anext(tokens)
    os.killpg(servers.decode.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        async for _ in tokens:
            pass
    assert "no decode server answers" in await asyncio.wait_for(engine.wait_died(), 120)
