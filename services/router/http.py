"""The OpenAI-compatible API. Every refusal, also of unknown paths and of our own failures, has OpenAI's error form.

A request is answered with a status of its own until its first token is there; what fails later ends the stream with an error
event. A client that leaves, at any point, cancels its request.
"""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router import answers, errors, sse
from services.router.answers import ChatShape, CompletionShape, Head, Part, Shape
from services.router.bodies import Bodies
from services.router.calls import Call, NotReceived, Unserved
from services.router.dispatch import Dispatcher
from services.router.openai import BadRequest, ChatRequest, CompletionRequest, parse
from services.router.prompts import Asked, Context, Offer, Prompts
from services.router.refusals import Refusals
from services.router.settings import RouterSettings
from shared.contracts.ids import RequestId, TenantId
from shared.runtime.clock import Clock, Ids

TENANT = TenantId("default")
HEADER_BYTES_MAX = 32 * 1024
SLO_MS_MAX = 3_600_000

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

T = TypeVar("T")


class Parts(NamedTuple):
    """What the API stands on."""

    settings: RouterSettings
    dispatcher: Dispatcher
    prompts: Prompts
    refusals: Refusals
    clock: Clock
    ids: Ids


class Api:
    """The handlers of `/v1`. One per process."""

    def __init__(self, parts: Parts) -> None:
        self._dispatcher = parts.dispatcher
        self._prompts = parts.prompts
        self._refusals = parts.refusals
        self._clock = parts.clock
        self._ids = parts.ids
        self._bodies = Bodies(parts.settings.body_bytes_max)
        self._keys = parts.settings.api_keys()
        self._started_s = parts.clock.now_ns() // 10**9

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route(
            "/v1/chat/completions", self.chat, methods=["POST"], openapi_extra=_body_schema(ChatRequest)
        )
        router.add_api_route(
            "/v1/completions", self.completion, methods=["POST"], openapi_extra=_body_schema(CompletionRequest)
        )
        router.add_api_route("/v1/models", self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        return router

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        return await self._guarded(request, lambda context: self._serve(request, context, ChatRequest))

    async def completion(self, request: Request) -> Response:
        """A continuation of a text or of token ids."""
        return await self._guarded(request, lambda context: self._serve(request, context, CompletionRequest))

    async def models(self, request: Request) -> Response:
        """The one model that this pool serves."""

        async def listed(_: Context) -> Response:
            offer = self._offer()
            return _json({"object": "list", "data": [self._model(offer)] if offer else []}, request)

        return await self._guarded(request, listed)

    async def model(self, request: Request, name: str) -> Response:
        """One model, by its id."""

        async def found(_: Context) -> Response:
            offer = self._offer()
            if offer is None or offer.model != name:
                raise _unknown_model(name)
            return _json(self._model(offer), request)

        return await self._guarded(request, found)

    # --- one request

    async def _guarded(self, request: Request, handle: Callable[[Context], Awaitable[Response]]) -> Response:
        """Refusals and failures as responses; refusals are counted."""
        headers = {"x-request-id": request.state.request_id}
        try:
            return await handle(self._context(request))
        except BadRequest as bad:
            self._refusals.count(TENANT, errors.refusal_reason(bad))
            return errors.of_bad_request(bad).response(headers)
        except NotReceived as refused:
            self._refusals.count(TENANT, errors.refusal_reason(refused))
            return errors.of_unserved(refused).response(headers)
        except Unserved as unserved:
            return errors.of_unserved(unserved).response(headers)
        except ClientDisconnect:
            return Response(status_code=499)

    async def _serve(
        self, request: Request, context: Context, cls: type[ChatRequest] | type[CompletionRequest]
    ) -> Response:
        slot = self._dispatcher.enter()
        try:
            async with self._bodies.read(request) as body:
                asked: Asked = parse(cls, body)
            order = await self._prompts.order(asked, self._offer_of(asked.model), context)
            call = await _unless_gone(request, self._dispatcher.submit(order, slot))
        except BaseException:
            slot.release()
            raise
        parts = answers.read(call, self._prompts.stream(order), asked.stop)
        try:
            first = await _unless_gone(request, _next(parts))
            if not asked.stream:
                rest = await _unless_gone(request, _all(parts))
                return _json(self._shape(asked, call).whole([first, *rest], answers.usage(call)), request, _told(call))
        except BaseException:
            call.leave()
            raise
        headers = {**_told(call), "x-request-id": request.state.request_id, "cache-control": "no-cache"}
        chunks = _chunks(call, self._shape(asked, call), first, parts, include_usage=asked.include_usage)
        return StreamingResponse(chunks, headers=headers, media_type=sse.MEDIA_TYPE)

    def _shape(self, asked: Asked, call: Call) -> Shape:
        created = self._clock.now_ns() // 10**9
        if isinstance(asked, ChatRequest):
            head = Head(f"chatcmpl-{call.request}", asked.model, created)
            return ChatShape(head, self._prompts.token_text, asked.alternatives)
        head = Head(f"cmpl-{call.request}", asked.model, created)
        return CompletionShape(head, self._prompts.token_text, asked.alternatives)

    def _context(self, request: Request) -> Context:
        """What the headers say. Errors: BadRequest."""
        self._authenticate(request)
        traceparent = request.headers.get("traceparent", "")
        return Context(
            request=RequestId(str(self._ids.next())),
            tenant=TENANT,
            arrived_ns=self._clock.monotonic_ns(),
            slo_us=_slo_us(request),
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
        )

    def _authenticate(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        if scheme.lower() != "bearer" or not any(hmac.compare_digest(given, known) for known in self._keys):
            raise BadRequest("a known API key is needed as bearer token", None, "invalid_api_key", status=401)

    def _offer_of(self, model: str) -> Offer:
        """Errors: BadRequest (404) for another model; NotReceived while no node has ever been seen."""
        offer = self._offer()
        if offer is None:
            raise NotReceived("no-worker", "no node has registered yet", 1)
        if offer.model != model:
            raise _unknown_model(model)
        return offer

    def _offer(self) -> Offer | None:
        return self._dispatcher.offer()

    def _model(self, offer: Offer) -> dict[str, Any]:
        return {"id": offer.model, "object": "model", "created": self._started_s, "owned_by": "vertumnus"}


class RequestHeaders:
    """Bounds the headers, and settles the id a response carries: the client's own, if it sent a proper one."""

    def __init__(self, app: ASGIApp, ids: Ids) -> None:
        self._app = app
        self._ids = ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(self._ids.next())
        scope.setdefault("state", {})["request_id"] = request_id
        size = sum(len(name) + len(value) for name, value in headers)
        if size > HEADER_BYTES_MAX:
            message = f"the headers have {size} bytes; at most {HEADER_BYTES_MAX} are taken"
            failure = errors.Failure(431, message, "headers_too_large")
            await failure.response({"x-request-id": request_id})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def build_app(parts: Parts, probes: APIRouter) -> FastAPI:
    """The whole HTTP surface."""
    app = FastAPI(title="Vertumnus", description="OpenAI-compatible serving with adaptive context parallelism")
    app.include_router(probes)
    app.include_router(Api(parts).routes())
    app.add_middleware(RequestHeaders, ids=parts.ids)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        headers = {**(error.headers or {}), "x-request-id": request.state.request_id}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return errors.Failure(error.status_code, message, code).response(headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, _: Exception) -> Response:
        return errors.INTERNAL.response({"x-request-id": request.state.request_id})

    return app


def _slo_us(request: Request) -> int | None:
    given = request.headers.get("x-vertumnus-ttft-slo-ms")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:16]) <= SLO_MS_MAX):
        raise BadRequest(
            f"x-vertumnus-ttft-slo-ms: whole milliseconds from 1 to {SLO_MS_MAX} are needed", None, "invalid_header"
        )
    return int(given) * 1_000


def _unknown_model(name: str) -> BadRequest:
    return BadRequest(f"the model {name[:128]!r} is not served here", "model", "model_not_found", status=404)


def _told(call: Call) -> dict[str, str]:
    """Who served, for clients and for `explain`."""
    assert call.served is not None, "there is a first token"
    return {
        "x-vertumnus-worker": call.served.worker,
        "x-vertumnus-cached-tokens": str(call.served.first.cached_tokens),
        "x-vertumnus-decision": str(call.served.decision),
    }


def _json(content: dict[str, Any], request: Request, headers: Mapping[str, str] | None = None) -> Response:
    more = {**(headers or {}), "x-request-id": request.state.request_id}
    return Response(orjson.dumps(content), headers=more, media_type="application/json")


def _body_schema(cls: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    """For `/docs`: bodies are read by hand, so FastAPI does not see them."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": cls.model_json_schema()}}}}


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives. Errors: ClientDisconnect as soon as the client hangs up; the work is cancelled then."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, hanging = asyncio.ensure_future(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait([working, hanging], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        hanging.cancel()
        working.cancel()


async def _next(parts: AsyncIterator[Part]) -> Part:
    return await anext(parts)


async def _all(parts: AsyncIterator[Part]) -> list[Part]:
    return [part async for part in parts]


async def _chunks(
    call: Call, shape: Shape, first: Part, parts: AsyncIterator[Part], *, include_usage: bool
) -> AsyncIterator[bytes]:
    """The stream's events. A failure behind the first token is its last event, and then there is no `[DONE]`."""
    try:
        yield sse.event(shape.chunk(first, first=True))
        async for part in parts:
            yield sse.event(shape.chunk(part, first=False))
        if include_usage:
            yield sse.event(shape.usage_chunk(answers.usage(call)))
        yield sse.DONE
    except Unserved as unserved:
        yield sse.event(errors.of_unserved(unserved).body)
    finally:
        call.leave()
