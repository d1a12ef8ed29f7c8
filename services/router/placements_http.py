"""`/v1/placements`: where a request should go, for gateways that forward it themselves.

The prompt comes as one of
    a body of `/v1/chat/completions` or `/v1/completions`, as a client sent it      application/json
    `{"block_ids": base64, "prompt_tokens": n}`, ids as `shared/model/blocks.py`    application/json
    token ids as u32, little-endian                                                 application/octet-stream
"""

from base64 import b64decode
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from services.router.decider import Arrival
from services.router.dispatch import Dispatcher
from services.router.entrance import Entrance, Parts, json_response
from services.router.offers import Offer
from services.router.openai import BadRequest, ChatRequest, CompletionRequest, parse, read
from services.router.placements import Placements
from services.router.prompts import Context, Prompts, too_long
from services.router.wiring import Placed
from shared.contracts.events import Finish, RequestCancelled, RequestCompleted
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, RequestId, node_of, unpack_block_ids
from shared.model.blocks import Tokens

TOKENS_TYPE = "application/octet-stream"


TOLD = {
    "worker",
    "degree",
    "decode_worker",
    "policy",
    "cached_tokens",
    "uncached_tokens",
    "queue_us",
    "service_us",
    "fetch_from",
    "fetch_blocks",
    "candidates",
    "excluded",
}
"""What of `request-assigned` is in the answer."""


class Prompt(NamedTuple):
    """What a decision needs of a prompt."""

    tokens: int
    max_tokens: int
    chain: tuple[BlockId, ...]


class BlocksRequest(BaseModel):
    """A prompt by the ids of its whole blocks. `max_tokens` is what a decode rank on the node would reserve."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(default=None, min_length=1, max_length=256)
    block_ids: str = Field(description="base64 of 16 bytes per block, first block first")
    prompt_tokens: int = Field(ge=1, le=2**31 - 1)
    max_tokens: int = Field(default=1, ge=1, le=2**31 - 1)

    def chain(self, block_tokens: int) -> tuple[BlockId, ...]:
        """Errors: BadRequest."""
        try:
            packed = b64decode(self.block_ids, validate=True)
        except ValueError:
            raise BadRequest("block_ids: this is no base64", "block_ids", "invalid_value") from None
        whole = self.prompt_tokens // block_tokens
        if len(packed) != whole * BLOCK_ID_BYTES:
            raise BadRequest(
                f"block_ids: {len(packed)} bytes; {self.prompt_tokens} tokens have {whole} whole blocks of {block_tokens}, "
                f"{BLOCK_ID_BYTES} bytes each",
                "block_ids",
                "invalid_value",
            )
        return tuple(unpack_block_ids(packed))


class CompletedReport(BaseModel):
    """How a placed request went, as the gateway saw it: milliseconds from its arrival to its first token, and their parts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: float = Field(ge=0, le=86_400_000)
    queue_ms: float = Field(default=0, ge=0, le=86_400_000)
    prefill_ms: float | None = Field(default=None, ge=0, le=86_400_000, description="without it, ttft_ms less queue_ms")
    tpot_ms: float = Field(default=0, ge=0, le=86_400_000)
    output_tokens: int = Field(default=1, ge=0, le=2**31 - 1)
    cached_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1, description="without it, as was predicted")
    finish: Finish = "stop"

    def fact(self, placed: Placed) -> RequestCompleted:
        """Errors: BadRequest if the parts are longer than the whole."""
        prefill_ms = max(0.0, self.ttft_ms - self.queue_ms) if self.prefill_ms is None else self.prefill_ms
        if self.queue_ms + prefill_ms > self.ttft_ms + 1:
            raise BadRequest("ttft_ms: less than queue_ms and prefill_ms together", "ttft_ms", "invalid_value")
        ttft_us, queue_us, prefill_us = (round(each * 1_000) for each in (self.ttft_ms, self.queue_ms, prefill_ms))
        assigned = placed.assigned
        return RequestCompleted(
            request=assigned.request,
            worker=assigned.worker,
            ttft_us=ttft_us,
            queue_us=queue_us,
            prefill_us=prefill_us,
            handoff_us=max(0, ttft_us - queue_us - prefill_us),
            tpot_us=round(self.tpot_ms * 1_000),
            output_tokens=self.output_tokens,
            cached_tokens=assigned.cached_tokens if self.cached_tokens is None else self.cached_tokens,
            finish=self.finish,
        )


class PlacementApi:
    """The handlers. One per process."""

    def __init__(self, parts: Parts, entrance: Entrance) -> None:
        self._entrance = entrance
        self._dispatcher: Dispatcher = parts.dispatcher
        self._prompts: Prompts = parts.prompts
        self._placements: Placements = parts.placements
        self._start_s = parts.settings.placement_start_s

    def routes(self) -> APIRouter:
        router = APIRouter(prefix="/v1/placements")
        router.add_api_route("", self.place, methods=["POST"], status_code=201)
        router.add_api_route("/{name}/started", self.started, methods=["POST"])
        router.add_api_route("/{name}/completed", self.completed, methods=["POST"])
        router.add_api_route("/{name}/cancelled", self.cancelled, methods=["POST"])
        return router

    async def place(self, request: Request) -> Response:
        """Where a request should go. It is reserved there until its end is reported."""

        async def placed(context: Context) -> Response:
            self._dispatcher.enter().release()  # what has no place now is refused before its body is read
            async with self._entrance.bodies.read(request) as body:
                arrival = await self._arrival(request, body, context)
            found = await self._placements.place(arrival, context.traceparent, self._dispatcher.enter())
            return json_response(self._told(found), request, status=201)

        return await self._entrance.guarded(request, placed)

    async def started(self, request: Request, name: str) -> Response:
        """The request has begun at its worker."""
        return await self._report(request, name, lambda _, placed: self._placements.started(placed.assigned.request))

    async def completed(self, request: Request, name: str) -> Response:
        """Its prompt is computed, or all of it: what was reserved is free."""

        def end(body: bytes, placed: Placed) -> None:
            self._placements.end(parse(CompletedReport, read(body)).fact(placed))

        return await self._report(request, name, end)

    async def cancelled(self, request: Request, name: str) -> Response:
        """It goes no further."""

        def end(_: bytes, placed: Placed) -> None:
            self._placements.end(RequestCancelled(request=placed.assigned.request))

        return await self._report(request, name, end)

    async def _report(self, request: Request, name: str, take: Callable[[bytes, Placed], None]) -> Response:
        async def taken(_: Context) -> Response:
            async with self._entrance.bodies.read(request) as body:
                take(body, self._placements.find(RequestId(name)))
            return json_response({"id": name, "object": "placement"}, request)

        return await self._entrance.guarded(request, taken)

    async def _arrival(self, request: Request, body: bytes, context: Context) -> Arrival:
        """Errors: BadRequest, NotReceived."""
        if request.headers.get("content-type", "").partition(";")[0].strip() == TOKENS_TYPE:
            offer = self._entrance.offer_of(None)
            tokens = _token_ids(body)
            chain = await self._prompts.chain(tokens, offer, context.tenant)
            return self._asked(context, offer, Prompt(len(tokens), 1, chain))
        asked = _read(body)
        offer = self._entrance.offer_of(asked.model)
        if isinstance(asked, BlocksRequest):
            if asked.prompt_tokens > offer.prompt_tokens_max:
                raise too_long(
                    f"the prompt has {asked.prompt_tokens} tokens; at most {offer.prompt_tokens_max} are taken",
                    "prompt_tokens",
                )
            chain = asked.chain(offer.block_tokens)
            return self._asked(context, offer, Prompt(asked.prompt_tokens, asked.max_tokens, chain))
        order = await self._prompts.order(asked, offer, context)
        return self._asked(context, offer, Prompt(order.prompt_tokens, order.max_tokens, order.chain))

    def _asked(self, context: Context, offer: Offer, prompt: Prompt) -> Arrival:
        return Arrival(
            request=context.request,
            tenant=context.tenant,
            model=offer.model,
            prompt_tokens=prompt.tokens,
            max_tokens=prompt.max_tokens,
            slo_us=context.slo_us,
            stream=False,
            chain=prompt.chain,
            client_digest=context.client_digest,
            placed_only=True,
            hard_slo=context.hard_slo,
            priority=context.priority,
        )

    def _told(self, placed: Placed) -> dict[str, Any]:
        assigned = placed.assigned
        return {
            "id": assigned.request,
            "object": "placement",
            "decision": str(placed.event.id),
            "report_within_s": self._start_s,
            "node": node_of(assigned.worker),
            **assigned.model_dump(mode="json", include=TOLD),
        }


def _token_ids(body: bytes) -> Tokens:
    """Errors: BadRequest."""
    if not body or len(body) % 4:
        raise BadRequest(f"the body has {len(body)} bytes; token ids take 4 each", None, "invalid_value")
    return np.frombuffer(body, dtype="<u4")


def _read(body: bytes) -> BlocksRequest | ChatRequest | CompletionRequest:
    """Errors: BadRequest."""
    content = read(body)
    if "block_ids" in content:
        return parse(BlocksRequest, content)
    if "messages" in content:
        return parse(ChatRequest, content)
    return parse(CompletionRequest, content)
