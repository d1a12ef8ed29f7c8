"""A prefill server that switches, and a decode server that is never told."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import httpx
import pytest

from services.worker.engine.sglang.verbs import Verbs
from shared.model.lattice import Composition
from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.chain import NEW_TOKENS, check_groups, expected, switched
from tests.sglang.traffic import mixed_prompts
from tests.support.adapter_servers import DECODE, PREFILL, Running, launched, wait_up
from tests.support.switching_servers import client, generate

pytestmark = ON_REAL_SERVERS

STOPS: list[Composition] = [(2,), (1, 1), (2,), (1, 1)]
REQUESTS = 60
EPOCHS = count(1)
ROOMS = count(1)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """Prefill and decode."""
    logs = tmp_path_factory.mktemp("logs")
    with (
        launched(model, logs / "prefill", *PREFILL, units=2) as prefill,
        launched(model, logs / "decode", *DECODE) as decode,
    ):
        wait_up(prefill, decode)
        yield prefill, decode


async def test_decode_never_notices(servers: tuple[Running, Running], fixed_server: Running) -> None:
    prefill_server, decode_server = servers
    async with (
        client(prefill_server.url) as prefill,
        client(decode_server.url) as decode,
        client(fixed_server.url) as reference,
    ):
        await _switch_under_load(prefill, decode, reference, prefill_server.bootstrap_port)


async def _switch_under_load(
    prefill: httpx.AsyncClient, decode: httpx.AsyncClient, reference: httpx.AsyncClient, bootstrap_port: int
) -> None:
    verbs = Verbs(prefill, 2)
    turn = asyncio.Semaphore(4)

    async def both(prompt: Sequence[int]) -> list[int]:
        """As a router does: the same request to both at once, in one room; rooms alternate between units."""
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": next(ROOMS)}
        async with turn:
            _, (tokens, _) = await asyncio.gather(
                generate(prefill, prompt, NEW_TOKENS, **fields), generate(decode, prompt, NEW_TOKENS, **fields)
            )
        return tokens

    prompts = mixed_prompts(REQUESTS, seed=9)
    answers = await expected(reference, prompts)
    share = REQUESTS // (len(STOPS) + 1)
    assert list(await asyncio.gather(*map(both, prompts[:share]))) == answers[:share]
    for index, stop in enumerate(STOPS, start=1):
        part = slice(index * share, (index + 1) * share)
        got, _ = await asyncio.gather(asyncio.gather(*map(both, prompts[part])), switched(verbs, EPOCHS, stop))
        assert list(got) == answers[part], stop
        await check_groups(verbs)
