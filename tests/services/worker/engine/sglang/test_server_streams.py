"""A streamed answer comes in parts as it was sent, whatever a model writes and wherever a piece of it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.protocol import EngineError
from services.worker.engine.sglang.generations import TokenStream
from services.worker.engine.sglang.server import Server


class Pieces(httpx.AsyncByteStream):
    """Octets, so many at a time."""

    def __init__(self, octets: bytes, size: int) -> None:
        self._octets, self._size = octets, size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._octets), self._size):
            yield self._octets[at : at + self._size]


async def streamed(parts: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    octets = b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
    server = Server("http://n:1", None)
    server.http = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=Pieces(octets, size))), base_url=server.url
    )
    return [part async for part in server.stream({})]


async def test_characters_that_end_lines_elsewhere_end_none_here() -> None:
    parts = [{"text": f"one{end}two", "output_ids": [1]} for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"]
    assert await streamed(parts, 1_000) == parts


@pytest.mark.parametrize("failure", [httpx.ReadError("cut"), RuntimeError("nobody thought of it")])
async def test_whoever_waits_for_a_token_hears_of_any_failure(failure: Exception) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise failure

    server = Server("http://n:1", None)
    server.http = httpx.AsyncClient(transport=httpx.MockTransport(fail), base_url=server.url)
    stream = TokenStream(server, "r", {}, incremental=False)
    with pytest.raises(EngineError, match=str(failure)):
        await asyncio.wait_for(stream.first(), 60)
    with pytest.raises(EngineError, match=str(failure)):
        await asyncio.wait_for(anext(stream.tokens()), 60)


async def test_whoever_waits_for_a_token_hears_that_nobody_wants_it_any_more() -> None:
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("for ever")

    server = Server("http://n:1", None)
    server.http = httpx.AsyncClient(transport=httpx.MockTransport(hang), base_url=server.url)
    stream = TokenStream(server, "r", {}, incremental=False)
    waiting = [asyncio.ensure_future(each) for each in (stream.first(), anext(stream.tokens()))]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(stream.stop())
    for each in waiting:
        with pytest.raises(EngineError, match="r was cancelled"):
            await asyncio.wait_for(each, 60)
    stopping.cancel()


@given(st.lists(st.builds(dict, text=st.text(max_size=5))), st.integers(1, 40))
async def test_pieces_may_end_anywhere(parts: list[dict[str, Any]], size: int) -> None:
    assert await streamed(parts, size) == parts
