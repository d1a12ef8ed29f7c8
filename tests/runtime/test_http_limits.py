"""What a client costs a service beside its request: real sockets against uvicorn with our bounds."""

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import orjson
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from shared.runtime import http_limits
from shared.runtime.http_limits import BoundedHttp, Turns, connections_max
from tests.support.replica import eventually

GET = b"GET /quick HTTP/1.1\r\nhost: x\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


class Service:
    """What its handlers saw. `/whole` reads its body, `/early` does not, `/wait` ends with its client, `/flood` never."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.left = 0
        self.waiting = 0
        for path, handler in (("quick", self.quick), ("wait", self.wait), ("flood", self.flood)):
            self.app.add_api_route(f"/{path}", handler)
        self.app.add_api_route("/early", self.quick, methods=["POST"])
        self.app.add_api_route("/whole", self.whole, methods=["POST"])

    async def quick(self) -> str:
        return "quick"

    async def whole(self, request: Request) -> int:
        return len(await request.body())

    async def wait(self, request: Request) -> str:
        self.waiting += 1
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left += 1
        return "left"

    async def flood(self) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(64 * 1024)
                    await asyncio.sleep(0)
            finally:
                self.left += 1

        return StreamingResponse(chunks())


@asynccontextmanager
async def serving(connections: int | None = None) -> AsyncIterator[tuple[Service, Connect]]:
    service = Service()
    config = uvicorn.Config(
        service.app,
        http=partial(BoundedHttp, Turns()),  # type: ignore[arg-type]
        ws="none",
        limit_concurrency=connections,
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(server.serve(sockets=[listener]))
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> Connection:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            opened.append(writer)
            return reader, writer

        try:
            yield service, connect
        finally:
            for writer in opened:
                writer.close()
            server.should_exit = True
            await running


async def rest(reader: asyncio.StreamReader, limit_s: float = 60) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    received = b""
    async with asyncio.timeout(limit_s):
        try:
            while some := await reader.read(65_536):
                received += some
        except ConnectionResetError:
            pass
    return received


def refused(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that stands alone."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), orjson.loads(body)["error"]["code"]


@pytest.mark.parametrize("beginning", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"])
async def test_an_endless_head_is_cut_off(beginning: bytes) -> None:
    piece = b"x: " + b"y" * 1_021 + b"\r\n" if beginning.endswith(b"\r\n") else b"y" * 1_024
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(beginning)
        sent = 0
        try:
            while sent < 40 * http_limits.HEAD_BYTES_MAX and not writer.is_closing():
                writer.write(piece)
                sent += len(piece)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        # A line that is too long for the parser is no HTTP; what arrives after the refusal may reset the connection.
        assert (answer := await rest(reader)) == b"" or refused(answer) in [
            (431, "headers_too_large"),
            (400, "bad_http"),
        ]
        assert sent < 40 * http_limits.HEAD_BYTES_MAX
        assert await alive(connect)


async def alive(connect: Connect) -> bool:
    reader, writer = await connect()
    writer.write(GET)
    return (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_large_body_is_no_head() -> None:
    async with serving() as (_, connect):
        reader, writer = await connect()
        for _ in range(3):
            body = bytes(1_000_000)
            writer.write(b"POST /whole HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.readuntil(b"1000000")).startswith(b"HTTP/1.1 200")


async def test_a_slow_head_is_answered_and_a_silent_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S_MAX", 0.3)
    async with serving() as (_, connect):
        silent, _ = await connect()
        slow, writer = await connect()
        begun = time.monotonic()
        trickle = asyncio.create_task(_trickle(writer))
        assert refused(await rest(slow)) == (408, "request_timeout")
        assert await rest(silent) == b""
        assert time.monotonic() - begun > 0.25
        trickle.cancel()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HTTP/1.1\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await asyncio.sleep(0.02)


async def test_blank_lines_do_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S_MAX", 0.3)
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(GET)
        assert await reader.readuntil(b'"quick"')
        for _ in range(100):
            writer.write(b"\r\n")
            await asyncio.sleep(0.02)
            if _is_over(reader):
                break
        assert _is_over(reader)


def _is_over(reader: asyncio.StreamReader) -> bool:
    """Ended, or reset because a line was still under way."""
    return reader.at_eof() or reader.exception() is not None


async def test_who_reads_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "STALLED_S_MAX", 0.3)
    async with serving() as (service, connect):
        reader, writer = await connect()
        writer.write(GET.replace(b"quick", b"flood"))
        await eventually(lambda: service.left)
        other, writer = await connect()
        writer.write(GET.replace(b"quick", b"flood"))
        async with asyncio.timeout(60):
            for _ in range(20):
                await other.readexactly(1_000_000)
        assert service.left == 1, "who reads is served on"
        assert reader


async def test_an_answer_before_the_whole_request_arrives_and_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "LINGER_S", 0.3)
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        assert await reader.readuntil(b'"quick"')
        begun = time.monotonic()
        # A connection that is closed while a byte is on its way is reset, and that is no end of a stream.
        while not reader.at_eof() and reader.exception() is None and time.monotonic() - begun < 60:
            writer.write(b"y")
            await asyncio.sleep(0.02)
        assert 0.2 < time.monotonic() - begun < 60


async def test_the_rest_of_a_request_in_time_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "LINGER_S", 0.3)
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        assert await reader.readuntil(b'"quick"')
        writer.write(b"rest")
        await asyncio.sleep(0.5)
        writer.write(GET)
        assert await reader.readuntil(b'"quick"')


async def test_a_client_that_leaves_ends_the_request_others_are_pipelined_behind() -> None:
    async with serving() as (service, connect):
        _, writer = await connect()
        writer.write(GET.replace(b"quick", b"wait") * 3)
        await eventually(lambda: service.waiting)
        writer.close()
        await eventually(lambda: service.left)
        await asyncio.sleep(0.1)
        assert (service.waiting, service.left) == (1, 1), "those behind it never began"


async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(GET * 5)
        for _ in range(5):
            assert await reader.readuntil(b'"quick"')


async def test_one_connection_too_many() -> None:
    async with serving(connections=2) as (_, connect):
        kept = [await connect() for _ in range(2)]
        for _, writer in kept:
            writer.write(GET)
        for reader, _ in kept:
            assert await reader.readuntil(b'"quick"')
        third, _ = await connect()
        assert refused(await rest(third)) == (503, "overloaded")
        kept[0][1].close()
        await asyncio.sleep(0.1)
        assert await alive(connect)


async def test_no_upgrade_is_taken() -> None:
    async with serving() as (_, connect):
        reader, writer = await connect()
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


def test_the_limit_leaves_files_for_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert connections_max() == min(http_limits.CONNECTIONS_MAX, hard - http_limits.OTHER_FILES)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_burst_leaves_the_loop_to_others() -> None:
    """200 handlers that begin in one turn of the loop are 200 times a handler's processor time without a turn for others."""
    begun = 0

    async def count() -> str:
        nonlocal begun
        begun += 1
        return "counted"

    async with serving() as (service, connect):
        service.app.add_api_route("/counted", count)
        connections = [await connect() for _ in range(200)]
        for _, writer in connections:
            writer.write(GET.replace(b"quick", b"counted"))
        most = 0
        answers = asyncio.gather(*(reader.readuntil(b'"counted"') for reader, _ in connections))
        while not answers.done():
            before = begun
            await asyncio.sleep(0)
            most = max(most, begun - before)
        assert 0 < most <= 2 * http_limits.BEGIN_PER_TURN
        assert len(await answers) == 200
