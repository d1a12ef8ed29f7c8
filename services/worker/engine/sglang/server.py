"""One SGLang server over HTTP: what the adapter asks of it, and what each failure means."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import orjson
from pydantic import ValidationError

from services.worker.engine.protocol import EngineError
from services.worker.engine.sglang.facts import Facts
from services.worker.engine.sglang.health import PROBE_LIMIT_S, Failure

ASK_LIMIT_S = 30.0
"""For what a scheduler answers between two batches."""

CONNECT_LIMIT_S = 5.0
NOBODY = "vertumnus joins"
"""No request's name."""

DATA = b"data: "
END = b"[DONE]"


class ServerLost(EngineError):
    """The connection could not be made, or broke: the server may be gone. What it was asked for may have begun."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure: Failure = failure


class Server:
    """`url` as the settings have it; `key` is the server's API key, if it has one. `close` when done."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A prefill takes as long as it takes: whoever waits for it has a limit of his own.
        timeout = httpx.Timeout(None, connect=CONNECT_LIMIT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)

    async def facts(self) -> Facts:
        """What it says of itself. Errors: ServerLost; EngineError if it is no SGLang server of a version that can be read."""
        told = {**await self._get("/model_info", ASK_LIMIT_S), **await self._get("/server_info", ASK_LIMIT_S)}
        try:
            return Facts.model_validate(told)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise EngineError(f"{self.url}: /server_info: {field}: {first['msg']}") from None

    async def join(self) -> Facts:
        """`facts` of a server that also takes orders: with an `--admin-api-key` of its own it would answer requests and end
        none, nor switch. Errors: as `facts`."""
        facts = await self.facts()
        try:
            await self.abort(NOBODY)
        except ServerLost:
            raise
        except EngineError as error:
            raise EngineError(
                f"{error} (/abort_request; of a server with an --admin-api-key this is the agent's)"
            ) from None
        return facts

    async def probe(self) -> None:
        """Whether the main process answers, without asking a scheduler, which may be in a long batch. Errors: ServerLost."""
        await self._get("/model_info", PROBE_LIMIT_S)

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One whole answer. Errors: ServerLost; EngineError with SGLang's words for what it refuses."""
        try:
            response = await self.http.post("/generate", content=orjson.dumps(body), headers=_JSON)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        return self._read(response.status_code, response.content)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Each part of a streamed answer. Closing it closes the connection, upon which SGLang aborts the request.
        Errors: as `generate`; ServerLost also if the stream ends before SGLang has said so."""
        try:
            async with self.http.stream("POST", "/generate", content=orjson.dumps(body), headers=_JSON) as response:
                if response.status_code != httpx.codes.OK:
                    self._read(response.status_code, await response.aread())
                async for line in _lines(response):
                    if line == DATA + END:
                        return
                    if line.startswith(DATA):
                        yield self._read(httpx.codes.OK, line.removeprefix(DATA))
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        raise ServerLost("unanswered", f"{self.url}: the stream ended before its end")

    async def abort(self, rid: str) -> None:
        """Stop a request; of one that is over or unknown nothing is said. Errors: ServerLost; EngineError if it is refused."""
        try:
            response = await self.http.post("/abort_request", json={"rid": rid}, timeout=ASK_LIMIT_S)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code != httpx.codes.OK:
            self._read(response.status_code, response.content)

    async def close(self) -> None:
        """Break every connection."""
        await self.http.aclose()

    async def _get(self, path: str, limit_s: float) -> dict[str, Any]:
        """Errors: ServerLost, also if it is not ready; EngineError."""
        try:
            response = await self.http.get(path, timeout=limit_s)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise ServerLost("unanswered", f"{self.url}: not ready ({response.content[:200]!r})")
        return self._read(response.status_code, response.content)

    def _read(self, status: int, content: bytes) -> dict[str, Any]:
        """Errors: EngineError with the words of a refusal, and of nothing else in it: a schema's error quotes what was sent, a
        prompt's tokens. Of one request 503 is a refusal too: its queue is full, say. In a stream, which has begun with 200, a
        part may be one."""
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            answer = {"error": content[:200].decode(errors="replace")}
        if not isinstance(answer, dict):
            raise EngineError(f"{self.url}: {status}: answered with a {type(answer).__name__}, not an object")
        if status != httpx.codes.OK or "error" in answer:
            raise EngineError(f"{self.url}: {status}: {_words(answer)[:500]}")
        return answer

    def _lost(self, error: httpx.HTTPError) -> ServerLost:
        failure: Failure = "refused" if isinstance(error, httpx.ConnectError) else "unanswered"
        return ServerLost(failure, f"{self.url}: {type(error).__name__}: {error}")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """What line feeds end. Lines of httpx also end at U+0085, U+2028 and U+2029, which SGLang's JSON has in it as they are
    where a model has written them."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def _words(answer: Mapping[str, Any]) -> str:
    """The sentence of an error in OpenAI's form or in SGLang's own; empty if it has none."""
    error = answer.get("error", answer)
    words = error.get("message") if isinstance(error, dict) else error
    return words if isinstance(words, str) else ""


_JSON = {"Content-Type": "application/json"}
