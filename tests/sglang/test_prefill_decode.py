"""A prefill server that switches, and a decode server that is never told."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from pathlib import Path

import httpx
import pytest

from services.worker.engine.sglang.verbs import Verbs
from shared.model.lattice import Composition
from tests.sglang.chain import NEW_TOKENS, check_groups, expected, switched
from tests.sglang.traffic import mixed_prompts
from tests.support.sglang_servers import INSTALLED, SglangServer, free_port, generate

pytestmark = pytest.mark.skipif(
    not (INSTALLED / "debian").exists(), reason="the transfer engine's libraries are missing"
)

STOPS: list[Composition] = [(2,), (1, 1), (2,), (1, 1)]
REQUESTS = 60
EPOCHS = count(1)
ROOMS = count(1)


@pytest.fixture(scope="module")
def bootstrap_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def servers(
    qwen3: Path, bootstrap_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SglangServer, SglangServer]]:
    transfer = ("--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", str(bootstrap_port))
    directory = tmp_path_factory.mktemp("pd")
    tcp = {"MC_FORCE_TCP": "1"}
    prefill = SglangServer(
        qwen3,
        directory / "prefill",
        units=2,
        pool_tokens=12_000,
        extra=("--disaggregation-mode", "prefill", "--load-balance-method", "follow_bootstrap_room", *transfer),
        environment=tcp,
    )
    decode = SglangServer(
        qwen3,
        directory / "decode",
        pool_tokens=60_000,
        extra=("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "none", *transfer),
        environment=tcp,
    )
    with prefill, decode:
        yield prefill, decode


@pytest.fixture
async def clients(
    servers: tuple[SglangServer, SglangServer], plain: SglangServer
) -> AsyncIterator[tuple[httpx.AsyncClient, ...]]:
    urls = (servers[0].url, servers[1].url, plain.url)
    clients = [httpx.AsyncClient(base_url=url, timeout=900.0) for url in urls]
    yield tuple(clients)
    for client in clients:
        await client.aclose()


async def test_decode_never_notices(clients: tuple[httpx.AsyncClient, ...], bootstrap_port: int) -> None:
    prefill, decode, reference = clients
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
