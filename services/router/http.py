"""The OpenAI-compatible API. Every refusal, also of unknown paths and of our own failures, has OpenAI's error form.

A request is answered with a status of its own until its first token is there; what fails later ends the stream with an error
event. A client that leaves, at any point, cancels its request.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from services.router import answers, errors, sse
from services.router.answers import ChatShape, CompletionShape, Head, Part, Shape
from services.router.calls import Call, Order, Slot, Unserved
from services.router.entrance import Entrance, Parts, json_response, unknown_model
from services.router.headers import RequestHeaders
from services.router.offers import Offer
from services.router.openai import ChatRequest, CompletionRequest, StreamOptions, parse, read
from services.router.placements_http import PlacementApi
from services.router.prompts import Asked, Context
from services.router.text import StopCutter


class Api:
    """The handlers of `/v1`. One per process."""

    def __init__(self, parts: Parts, entrance: Entrance) -> None:
        self._entrance = entrance
        self._dispatcher = parts.dispatcher
        self._prompts = parts.prompts
        self._clock = parts.clock
        self._started_s = parts.clock.now_ns() // 10**9

    def routes(self) -> APIRouter:
        router = APIRouter()
        # Bodies are read by hand, so requests need nothing of what FastAPI does for a route of its own; its routes behind these
        # are what `/docs` shows.
        router.add_route("/v1/chat/completions", self.chat, methods=["POST"], include_in_schema=False)
        router.add_route("/v1/completions", self.completion, methods=["POST"], include_in_schema=False)
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
        return await self._entrance.guarded(request, lambda context: self._serve(request, context, ChatRequest))

    async def completion(self, request: Request) -> Response:
        """A continuation of a text or of token ids."""
        return await self._entrance.guarded(request, lambda context: self._serve(request, context, CompletionRequest))

    async def models(self, request: Request) -> Response:
        """The one model that this pool serves."""

        async def listed(_: Context) -> Response:
            offer = self._entrance.offer()
            return json_response({"object": "list", "data": [self._model(offer)] if offer else []}, request)

        return await self._entrance.guarded(request, listed)

    async def model(self, request: Request, name: str) -> Response:
        """One model, by its id."""

        async def found(_: Context) -> Response:
            offer = self._entrance.offer()
            if offer is None or offer.model != name:
                raise unknown_model(name)
            return json_response(self._model(offer), request)

        return await self._entrance.guarded(request, found)

    # --- one request

    async def _serve(
        self, request: Request, context: Context, cls: type[ChatRequest] | type[CompletionRequest]
    ) -> Response:
        asked, order, call = await self._admit(request, context, cls)
        cutter = StopCutter(asked.stop, shown=bool(asked.include_stop_str_in_output))
        parts = answers.read(call, self._prompts.stream(order), cutter)
        watch = asyncio.create_task(_leave_with(request, call), name=f"client of {call.request}")
        try:
            first = await anext(parts)
            if not asked.stream:
                every = [first, *[part async for part in parts]]
                return json_response(self._shape(asked, call).whole(every, answers.usage(call)), request, _told(call))
        except BaseException:
            call.leave()
            raise
        finally:
            watch.cancel()
        told = {**_told(call), "x-request-id": request.state.request_id, "cache-control": "no-cache"}
        chunks = _chunks(call, self._shape(asked, call), first, parts, asked.stream_options or StreamOptions())
        return AnswerStream(call, chunks, told)

    async def _admit(
        self, request: Request, context: Context, cls: type[ChatRequest] | type[CompletionRequest]
    ) -> tuple[Asked, Order, Call]:
        """Read, check and submit. The body's memory counts until it has become tokens, and a slow sender holds no place."""
        self._dispatcher.enter().release()  # what has no place now is refused before its body is read
        slot: Slot | None = None
        try:
            async with self._entrance.bodies.read(request) as body:
                asked: Asked = parse(cls, read(body))
                slot = self._dispatcher.enter()
                order = await self._prompts.order(asked, self._entrance.offer_of(asked.model), context)
            return asked, order, await self._dispatcher.submit(order, slot)
        except BaseException:
            if slot is not None:
                slot.release()
            raise

    def _shape(self, asked: Asked, call: Call) -> Shape:
        created = self._clock.now_ns() // 10**9
        if isinstance(asked, ChatRequest):
            head = Head(f"chatcmpl-{call.request}", asked.model, created)
            return ChatShape(head, self._prompts.token_bytes, asked.alternatives, asked.return_token_ids)
        head = Head(f"cmpl-{call.request}", asked.model, created)
        return CompletionShape(head, self._prompts.token_bytes, asked.alternatives, asked.return_token_ids)

    def _model(self, offer: Offer) -> dict[str, Any]:
        return {"id": offer.model, "object": "model", "created": self._started_s, "owned_by": "vertumnus"}


class AnswerStream(StreamingResponse):
    """A stream whose request is cancelled when the response ends before it, also if it never began."""

    def __init__(self, call: Call, chunks: AsyncIterator[bytes], told: Mapping[str, str]) -> None:
        super().__init__(chunks, headers=told, media_type=sse.MEDIA_TYPE)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.leave()


def build_app(parts: Parts, probes: APIRouter) -> FastAPI:
    """The whole HTTP surface."""
    app = FastAPI(title="Vertumnus", description="OpenAI-compatible serving with adaptive context parallelism")
    entrance = Entrance(parts)
    app.include_router(Api(parts, entrance).routes())  # first, because routes are tried in order
    app.include_router(PlacementApi(parts, entrance).routes())
    app.include_router(probes)
    app.add_middleware(RequestHeaders, ids=parts.ids)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        told = {**(error.headers or {}), "x-request-id": request.state.request_id}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return errors.Failure(error.status_code, message, code).response(told)

    @app.exception_handler(Exception)
    async def failed(request: Request, _: Exception) -> Response:
        return errors.INTERNAL.response({"x-request-id": request.state.request_id})

    return app


def _told(call: Call) -> dict[str, str]:
    """Who served, for clients and for `explain`."""
    assert call.served is not None, "there is a first token"
    return {
        "x-vertumnus-worker": call.served.worker,
        "x-vertumnus-cached-tokens": str(call.served.first.cached_tokens),
        "x-vertumnus-decision": str(call.served.decision),
    }


def _body_schema(cls: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    """For `/docs`: bodies are read by hand, so FastAPI does not see them."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": cls.model_json_schema()}}}}


async def _leave_with(request: Request, call: Call) -> None:
    """Cancel the call when its client hangs up. The body has been read, so nothing else can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call.leave()


async def _chunks(
    call: Call, shape: Shape, first: Part, parts: AsyncIterator[Part], options: StreamOptions
) -> AsyncIterator[bytes]:
    """The stream's events. A failure behind the first token is its last event, and then there is no `[DONE]`."""

    def so_far() -> dict[str, Any]:
        return {"usage": answers.usage(call)} if options.continuous_usage_stats else {}

    try:
        yield sse.event(shape.chunk(first, first=True) | so_far())
        async for part in parts:
            yield sse.event(shape.chunk(part, first=False) | so_far())
        if options.include_usage:
            yield sse.event(shape.usage_chunk(answers.usage(call)))
        yield sse.DONE
    except Unserved as unserved:
        yield sse.event(errors.of_unserved(unserved).body)
