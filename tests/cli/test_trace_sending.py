"""A trace sent over real sockets to a server that answers, refuses, breaks off or is slow, as each test says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from cli.trace.measuring import LinearObjective, Outcome, report
from cli.trace.sending import NoServer, Target, first_model, send
from shared.runtime.clock import SystemClock
from simulation.workloads.rows import Row

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(**document: Any) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
FIRST = event(choices=[{"text": "a", "finish_reason": None}])
LAST = event(choices=[{"text": "b", "finish_reason": "length"}])
USAGE = event(choices=[], usage={"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 100}})


def status(code: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d no\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (code, len(body), body)


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """One request a connection: the parsed body and the way to answer go to `answer`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"{}"
        await answer({"head": head, **orjson.loads(body)}, writer)
        await writer.drain()
        writer.close()

    running = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**20)
    try:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    finally:
        running.close()


async def whole(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + FIRST)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(LAST + USAGE + b"data: [DONE]\n\n")


def rows(count: int, every_ms: float = 0) -> list[Row]:
    return [Row(i * every_ms, 600, 3, (0, i)) for i in range(count)]


async def test_answers_are_measured() -> None:
    async with server(whole) as url:
        found = await send(rows(5, every_ms=40), Target(url, "m", objective=LinearObjective(5)), SystemClock())
    assert (found.requests, found.ok, found.refused, found.failed) == (5, 5, 0, 0)
    assert (found.prompt_tokens, found.output_tokens, found.cached_share) == (3000, 15, 500 / 3000)
    assert found.attainment_by_tokens == 1
    assert found.seconds >= 0.16 + 0.05
    assert found.ttft_s is not None
    assert found.ttft_s.p50 > 0
    # Five answers of three tokens; how far apart the pieces arrive is up to this machine.
    assert found.tpot_s is not None
    assert found.problems == {}


async def test_the_request_is_what_was_asked_for() -> None:
    seen: list[dict[str, Any]] = []

    async def look(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        await whole(request, writer)

    async with server(look) as url:
        target = Target(url, "m", api_key="secret", objective=LinearObjective(1, 0.5))
        await send(rows(1), target, SystemClock())
        await send(rows(1), target._replace(as_text=True), SystemClock())
    assert [request["head"].split(b" ")[1] for request in seen] == [b"/v1/completions", b"/v1/chat/completions"]
    assert all(b"authorization: Bearer secret" in request["head"] for request in seen)
    assert all(b"x-vertumnus-ttft-slo-ms: 1300" in request["head"] for request in seen)
    assert len(seen[0]["prompt"]) == 600


@pytest.mark.parametrize(
    ("written", "kind", "message"),
    [
        (status(429, b'{"error":{"message":"slow down"}}'), "http-429", "slow down"),
        (status(500, b"oops"), "http-500", "oops"),
        (HEAD + FIRST, "truncated", "without a finish reason"),
        (HEAD + FIRST + event(error={"message": "lost"}), "stream-error", "lost"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + FIRST, "disconnected", "closed"),
        (b"", "disconnected", "disconnected"),
    ],
)
async def test_what_goes_wrong_is_counted_by_kind(written: bytes, kind: str, message: str) -> None:
    async def answer(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(written)

    async with server(answer) as url:
        found = await send(rows(2), Target(url, "m", objective=LinearObjective(10)), SystemClock())
    refused = 2 if kind == "http-429" else 0
    assert (found.ok, found.refused, found.failed) == (0, refused, 2 - refused)
    assert found.problems[kind].requests == 2
    assert message in found.problems[kind].example
    assert found.attainment_by_tokens == 0
    assert found.ttft_s is None


async def test_silence_and_absence_are_told_apart() -> None:
    async def silent(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1)

    async with server(silent) as url:
        found = await send(rows(1), Target(url, "m", answer_s=0.1), SystemClock())
    assert set(found.problems) == {"timeout"}
    found = await send(rows(1), Target(url, "m"), SystemClock())
    assert set(found.problems) == {"connect"}


async def test_a_slow_server_does_not_slow_the_sender() -> None:
    """Open loop: nothing is answered before all ten requests are open, and they all are."""
    open_now, all_open = 0, asyncio.Event()

    async def slow(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        if open_now == 10:
            all_open.set()
        await all_open.wait()
        writer.write(HEAD + LAST)

    async with server(slow) as url:
        found = await asyncio.wait_for(send(rows(10, every_ms=10), Target(url, "m"), SystemClock()), 30)
    assert found.ok == 10


async def test_beyond_the_bound_requests_are_late_and_say_so() -> None:
    open_now = most = 0

    async def slow(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.3)
        open_now -= 1
        writer.write(HEAD + LAST)

    async with server(slow) as url:
        found = await send(rows(6), Target(url, "m", concurrency=2), SystemClock())
    assert most == 2
    assert found.late_s is not None
    assert found.late_s.max >= 0.6
    # What they waited for their turn is in their TTFT.
    assert found.ttft_s is not None
    assert found.ttft_s.max >= found.late_s.max + 0.3


async def test_the_first_model_is_asked_for() -> None:
    async def models(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(status(200, b'{"data":[{"id":"smol"},{"id":"other"}]}'))

    async with server(models) as url:
        assert await first_model(url) == "smol"
    with pytest.raises(NoServer, match="/v1/models: "):
        await first_model(url)


def test_attainment_weighs_tokens_and_counts_the_unanswered_as_misses() -> None:
    def outcome(kind: str, prompt_tokens: int, ttft_s: float, late_s: float = 0.0) -> Outcome:
        return Outcome(kind, "", prompt_tokens, 2, 0, late_s, ttft_s, 0.1)

    outcomes = [
        outcome("ok", 1000, 1.9),
        outcome("ok", 3000, 3.9),
        outcome("ok", 1000, 1.9, late_s=0.2),
        outcome("http-503", 5000, 0),
    ]
    found = report(outcomes, 10, LinearObjective(1, 1))
    assert found.attainment_by_tokens == 4000 / 10_000
    assert found.attainment_by_requests == 0.5
    assert report(outcomes, 10).attainment_by_tokens is None
