"""Send a trace to a running system: open loop, each request at its instant, whatever became of the ones before.

The one bound is `concurrency`: with that many requests open, the next one waits, is late, and counts as late.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import orjson

from cli.trace.measuring import OK, Objective, Outcome, Report, report
from cli.trace.wire import BadStream, TokenStream, chat_body, completion_body
from shared.runtime.clock import Clock
from simulation.workloads.rows import Row

CONNECT_S = 10.0
KEPT_S = 2.0
"""An idle connection is used again for so long: many servers close one after 5 s, and whose request is then on its way gets no
answer."""

MESSAGE_CHARS_MAX = 200


class Target(NamedTuple):
    """Where requests go, and how."""

    url: str
    """Of the server, without `/v1`."""
    model: str
    api_key: str | None = None
    as_text: bool = False
    """Chat messages of words instead of token ids: the server's template and tokeniser take part."""
    concurrency: int = 1024
    """Open requests at most, and so connections."""
    answer_s: float = 600.0
    """Longest silence of the server within an answer."""
    objective: Objective | None = None
    token_ids: bool = False
    """Ask for the generated ids (`return_token_ids`, an extension): with prompts of ids only."""


class NoServer(Exception):
    """The target does not answer as an OpenAI server does; the message says how it does."""


async def first_model(url: str, api_key: str | None = None) -> str:
    """The first model a server offers. Errors: NoServer."""
    try:
        async with httpx.AsyncClient(base_url=url, headers=_authorization(api_key), timeout=CONNECT_S) as client:
            answer = await client.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise NoServer(f"{url}/v1/models: {str(error) or type(error).__name__}") from error


async def send(
    rows: Iterable[Row], target: Target, clock: Clock, on_outcome: Callable[[Row, Outcome], None] | None = None
) -> Report:
    """Send every row at its arrival, counted from now, and report when all are answered.

    A failed request is an outcome, not an error. `on_outcome` sees each as it ends, in the event loop.
    """
    outcomes: list[Outcome] = []
    free = asyncio.Semaphore(target.concurrency)
    start_ns = clock.monotonic_ns()

    async def one(client: httpx.AsyncClient, row: Row, body: bytes, planned_ns: int) -> None:
        try:
            outcome = await _request(client, target, clock, row, body, planned_ns)
        finally:
            free.release()
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(row, outcome)

    async with _client(target) as client, asyncio.TaskGroup() as tasks:
        for row in rows:
            # Encoded before its instant, so that the work of encoding makes nothing late.
            body = _body(row, target)
            planned_ns = start_ns + round(row.arrival_ms * 1e6)
            await clock.sleep(max(0, planned_ns - clock.monotonic_ns()) / 1e9)
            await free.acquire()
            tasks.create_task(one(client, row, body, planned_ns))
    return report(outcomes, (clock.monotonic_ns() - start_ns) / 1e9, target.objective)


async def _request(
    client: httpx.AsyncClient, target: Target, clock: Clock, row: Row, body: bytes, planned_ns: int
) -> Outcome:
    sent_ns = clock.monotonic_ns()
    stream = TokenStream()
    kind, message, first_ns = OK, "", sent_ns
    try:
        async with _post(client, target, row, body) as answer:
            async for data in answer.aiter_raw():
                stream.feed(data, clock.monotonic_ns())
        first_ns = stream.check_complete()
    except BadStream as error:
        kind, message = error.kind, str(error)
    except httpx.HTTPError as error:
        kind, message = _kind(error), str(error) or type(error).__name__
    return Outcome(
        kind=kind,
        message=message[:MESSAGE_CHARS_MAX],
        prompt_tokens=stream.prompt_tokens(row.prompt_tokens),
        output_tokens=stream.output_tokens,
        cached_tokens=stream.cached_tokens,
        late_s=(sent_ns - planned_ns) / 1e9,
        ttft_s=(first_ns - sent_ns) / 1e9,
        decode_s=((stream.last_ns or first_ns) - first_ns) / 1e9,
        token_ids=tuple(stream.token_ids),
    )


def _body(row: Row, target: Target) -> bytes:
    if target.as_text:
        return chat_body(row, target.model)
    return completion_body(row, target.model, {"return_token_ids": True} if target.token_ids else None)


@asynccontextmanager
async def _post(client: httpx.AsyncClient, target: Target, row: Row, body: bytes) -> AsyncIterator[httpx.Response]:
    """The open answer. Errors: BadStream named for the status when it is not 200."""
    path = "/v1/chat/completions" if target.as_text else "/v1/completions"
    # Uncompressed, for the bytes are read as they arrive.
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if target.objective is not None:
        headers["x-vertumnus-ttft-slo-ms"] = str(round(1000 * target.objective.for_prompt(row.prompt_tokens)))
    async with client.stream("POST", path, content=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise BadStream(f"http-{answer.status_code}", _told(await answer.aread()))
        yield answer


def _told(body: bytes) -> str:
    """The message of an error in OpenAI's form, else the body."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:MESSAGE_CHARS_MAX].decode(errors="replace")


def _kind(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    return "timeout" if isinstance(error, httpx.TimeoutException) else "disconnected"


def _client(target: Target) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=target.url,
        headers=_authorization(target.api_key),
        timeout=httpx.Timeout(target.answer_s, connect=CONNECT_S),
        limits=httpx.Limits(
            max_connections=target.concurrency,
            max_keepalive_connections=target.concurrency,
            keepalive_expiry=KEPT_S,
        ),
        # The proxies of this machine's environment are not part of what is measured.
        trust_env=False,
    )


def _authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}
