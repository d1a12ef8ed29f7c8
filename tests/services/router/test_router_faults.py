"""What clients notice when processes die: real services on a real NATS server, and the test holds the knife."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types import Completion
from router_pool import MODEL, VOCABULARY, RouterPool

from cli.embedded.nats import EmbeddedNats
from shared.contracts.events import (
    EpochCommitted,
    NodeDeclaredLost,
    RequestCompleted,
    RequestFailed,
    RequestRedirected,
    RouterLost,
)
from tests.support.replica import Replica, eventually, witness

PROMPT = [5, 6, 7, 8] * 100
SLOW = 1.0


class Clients(AsyncOpenAI):
    def __init__(self, pool: RouterPool) -> None:
        super().__init__(base_url=pool.api, api_key="none", max_retries=0, timeout=60)

    async def text(self, **more: Any) -> str:
        fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "seed": 1, **more}
        answer = await self.completions.create(**fields)
        return answer.choices[0].text

    async def stream(self, max_tokens: int) -> AsyncStream[Completion]:
        return await self.completions.create(model=MODEL, prompt=PROMPT, max_tokens=max_tokens, seed=1, stream=True)


async def read(stream: AsyncStream[Completion], count: int | None = None) -> str:
    """The text of the next `count` chunks, or of the rest."""
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        if count is not None and (count := count - 1) == 0:
            break
    return text


@pytest.fixture
def pool(nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[RouterPool]:
    """A pool without a tokenizer, in real time: 60 tokens take two seconds. `other` is a second node's process."""
    pool = RouterPool(nats_server, tmp_path, speedup=SLOW)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


@pytest.fixture
def other(pool: RouterPool, nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[Replica]:
    other = pool.another_worker(nats_server, tmp_path, "m0")
    yield other
    other.stop(kill=True)


async def test_ids_in_ids_out_without_a_tokenizer(pool: RouterPool) -> None:
    async with Clients(pool) as client, httpx.AsyncClient(base_url=pool.api) as http:
        text = await client.text(max_tokens=4)
        ids = [int(each[1:-1]) for each in text.split()]
        assert len(ids) == 4
        assert all(1_000 <= each < VOCABULARY for each in ids)
        for path, body in (
            ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ("/completions", {"prompt": "hello"}),
            ("/completions", {"prompt": [1], "stop": "x"}),
        ):
            refused = await http.post(path, json={"model": MODEL, **body})
            assert refused.status_code == 400
            assert "no tokenizer" in refused.json()["error"]["message"]


async def test_a_worker_that_is_killed_mid_answer_costs_no_token(
    pool: RouterPool, other: Replica, nats_server: EmbeddedNats
) -> None:
    async with witness(nats_server) as seen, Clients(pool) as client:
        other.start()
        whole = await client.text()
        await eventually(lambda: len(seen.all(EpochCommitted)) == 2)
        stream = await client.stream(60)
        victim = pool.worker if stream.response.headers["x-vertumnus-worker"].startswith("n0/") else other
        text = await read(stream, 10)
        victim.stop(kill=True)
        text += await read(stream)
        assert text == whole
        assert seen.all(NodeDeclaredLost)
        assert [each.reason for each in seen.all(RequestRedirected)] == ["node-lost"]


async def until_draining(http: httpx.AsyncClient) -> None:
    while (await http.get("/readyz")).text != "draining\n":  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.02)


async def test_a_router_that_is_terminated_finishes_its_streams(pool: RouterPool, nats_server: EmbeddedNats) -> None:
    async with (
        witness(nats_server) as seen,
        Clients(pool) as client,
        httpx.AsyncClient(base_url=pool.router.url) as http,
    ):
        whole = await client.text()
        stream = await client.stream(60)
        text = await read(stream, 3)
        assert pool.router.pid is not None
        os.kill(pool.router.pid, signal.SIGTERM)
        await until_draining(http)
        refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": [1]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"] == "1"
        assert text + await read(stream) == whole
        await eventually(lambda: pool.router.exit_status() is not None)
        assert pool.router.exit_status() == 0
        await eventually(lambda: len(seen.all(RequestCompleted)) == 2)
        assert not seen.all(RequestFailed)


async def test_a_router_that_is_killed_leaves_nothing_behind(pool: RouterPool, nats_server: EmbeddedNats) -> None:
    async with witness(nats_server) as seen, Clients(pool) as client:
        stream = await client.stream(3_000)
        await read(stream, 2)
        pool.router.stop(kill=True)
        await eventually(lambda: seen.all(RouterLost))
        pool.router.start()
        await eventually(pool.router.ready)
        assert len((await client.text(max_tokens=5)).split()) == 5


async def test_a_router_that_stands_still_too_long_ends_itself(pool: RouterPool, nats_server: EmbeddedNats) -> None:
    async with witness(nats_server) as seen:
        assert pool.router.pid is not None
        await asyncio.sleep(2)
        os.kill(pool.router.pid, signal.SIGSTOP)
        await eventually(lambda: seen.all(RouterLost))
        os.kill(pool.router.pid, signal.SIGCONT)
        await eventually(lambda: pool.router.exit_status() is not None)
        assert pool.router.exit_status() == 1
        assert "declared" in pool.router.log.read_text()


async def test_requests_survive_a_restart_of_nats(pool: RouterPool, nats_server: EmbeddedNats) -> None:
    async with Clients(pool) as client:
        whole = await client.text()
        streams = [await client.stream(60) for _ in range(3)]
        texts = [await read(stream, 3) for stream in streams]
        nats_server.stop(kill=True)
        await asyncio.sleep(0.5)
        nats_server.start()
        answers = [text + await read(stream) for text, stream in zip(texts, streams, strict=True)]
        assert answers == [whole] * 3
        await eventually(pool.router.ready)
        assert await client.text() == whole
