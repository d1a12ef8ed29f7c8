"""What operators ask of the pool over HTTP. Each answer comes after the event is stored; routers act on it as they fold it.

    POST /v1/operator/freeze | thaw          {"asked_by": …, "reason": …}
    POST /v1/operator/cordon | uncordon      {"asked_by": …, "reason": …, "node": …}
    POST /v1/operator/pin | unpin | drain    {"asked_by": …, "reason": …, "node": …}
    POST /v1/operator/reconfigure            {"asked_by": …, "reason": …, "node": …, "composition": [1, 1, 2, 4]}
    POST /v1/operator/parameters             {"asked_by": …, "reason": …, "changes": {name: value, …}}
    GET  /v1/operator/parameters             every parameter and its value; a standby answers too

200 says which events were stored: none if what was asked for holds already. 401 without the operator key, 404 for an unknown
node, 409 says why a node cannot be reconfigured now, 413 and 422 name the field and its limit, 503 from a standby names the
leader.
"""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.controller import decider
from services.controller.decider import Asker, NotNow, State, UnknownNode
from shared.contracts.envelope import EventData
from shared.contracts.geometry import Composition
from shared.contracts.ids import NodeId
from shared.runtime.leadership import Decide, Leadership, NotLeading

BODY_BYTES_MAX = 64 * 1024
ANSWER_LIMIT_S = 5.0
WAITING_MAX = 32
"""Commands that may wait for the log at one time; operators are few."""


class Ask(BaseModel):
    """Who asks, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asked_by: str = Field(min_length=1, max_length=200)
    reason: str = Field(default="", max_length=1_000)

    @property
    def asker(self) -> Asker:
        return Asker(self.asked_by, self.reason)


class NodeAsk(Ask):
    """… about one node."""

    node: NodeId = Field(min_length=1, max_length=64)


class CompositionAsk(NodeAsk):
    """… for other workers of it."""

    composition: Composition


class ParametersAsk(Ask):
    """… for new values."""

    changes: dict[str, Any] = Field(min_length=1, max_length=64)


A = TypeVar("A", bound=Ask)


def operator_api(state: State, leadership: Leadership, key: str | None) -> APIRouter:
    """The routes. Without a `key` whoever reaches the port is an operator."""
    router = APIRouter(prefix="/v1/operator")
    waiting: set[asyncio.Task[Sequence[EventData]]] = set()

    def identify(request: Request) -> None:
        if key is not None and not hmac.compare_digest(_bearer(request), key.encode()):
            raise HTTPException(401, "the operator key is needed as bearer token", {"WWW-Authenticate": "Bearer"})

    async def ask(request: Request, form: type[A]) -> A:
        identify(request)
        try:
            return form.model_validate_json(await _body(request))
        except ValidationError as error:
            raise HTTPException(422, _first(error)) from error

    async def answer(decide: Decide) -> dict[str, list[str]]:
        if len(waiting) >= WAITING_MAX:
            raise HTTPException(503, f"{WAITING_MAX} operator commands wait for the log already")
        storing = asyncio.create_task(leadership.decide(decide))
        waiting.add(storing)
        storing.add_done_callback(waiting.discard)
        # Not cancelled when late: a commit under way is stored or fenced off, never broken off.
        await asyncio.wait([storing], timeout=ANSWER_LIMIT_S)
        if not storing.done():
            raise HTTPException(
                503, f"the log did not answer within {ANSWER_LIMIT_S:g} s; the command may still take effect"
            )
        try:
            return {"events": [each.TYPE for each in storing.result()]}
        except NotLeading as error:
            raise HTTPException(503, f"this controller does not lead; the last leader was {state.leader}") from error
        except UnknownNode as error:
            raise HTTPException(404, str(error)) from error
        except NotNow as error:
            raise HTTPException(409, str(error)) from error
        except ValidationError as error:
            raise HTTPException(422, f"changes.{_first(error)}") from error
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @router.post("/freeze")
    async def freeze(request: Request) -> dict[str, list[str]]:
        asked = await ask(request, Ask)
        return await answer(lambda: decider.freeze(state, asked.asker))

    @router.post("/thaw")
    async def thaw(request: Request) -> dict[str, list[str]]:
        asked = await ask(request, Ask)
        return await answer(lambda: decider.thaw(state, asked.asker))

    def about_node(name: str, decide: Callable[[State, NodeId, Asker], list[EventData]]) -> None:
        async def command(request: Request) -> dict[str, list[str]]:
            asked = await ask(request, NodeAsk)
            return await answer(lambda: decide(state, asked.node, asked.asker))

        router.add_api_route(f"/{name}", command, methods=["POST"], name=name)

    about_node("cordon", decider.cordon)
    about_node("uncordon", decider.uncordon)
    about_node("pin", decider.pin)
    about_node("unpin", decider.unpin)
    about_node("drain", decider.drain)

    @router.post("/reconfigure")
    async def reconfigure(request: Request) -> dict[str, list[str]]:
        asked = await ask(request, CompositionAsk)
        return await answer(lambda: decider.reconfigure(state, asked.node, asked.composition, asked.asker))

    @router.post("/parameters")
    async def change_parameters(request: Request) -> dict[str, list[str]]:
        asked = await ask(request, ParametersAsk)
        return await answer(lambda: decider.change_parameters(state, asked.changes, asked.asker))

    @router.get("/parameters")
    async def parameters_now(request: Request) -> dict[str, Any]:
        identify(request)
        return state.parameters.model_dump()

    return router


def _bearer(request: Request) -> bytes:
    return request.headers.get("authorization", "").removeprefix("Bearer ").encode()


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(413, f"body: at most {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _first(error: ValidationError) -> str:
    """`field: what is wrong` of the first of the errors."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}" if field else first["msg"]
