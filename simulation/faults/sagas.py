"""Carries the sagas of one controller process out, while it leads: `advance` decides, `orders` asks the agents."""

import asyncio
from typing import Any, NoReturn

from pydantic import ValidationError

from services.controller import saga as saga_model
from services.controller.capacity import Capacity
from shared.contracts.commands import encode_message
from shared.contracts.ids import NodeId
from shared.runtime.leadership import NotLeading
from shared.runtime.ports import NoReply, Unavailable
from shared.runtime.service import Runtime

TICK_S = 0.25
ANSWER_S_MAX = 2.0


async def drive(hosted: Any, runtime: Runtime) -> NoReturn:
    """Until cancelled."""
    asking: dict[NodeId, asyncio.Task[None]] = {}
    while True:
        for node, opened in tuple(hosted.state.sagas.open.items()):
            if hosted.leadership.term is None:
                break
            try:
                await hosted.leadership.decide(lambda node=node: _advance(hosted.state, node, runtime))
            except NotLeading:
                break
            order = saga_model.orders(opened, hosted.state.parameters, hosted.leadership.term or 0)
            if order is not None and (node not in asking or asking[node].done()):
                asking[node] = asyncio.ensure_future(_ask(runtime, node, encode_message(order)))
        await runtime.clock.sleep(TICK_S)


def _advance(state: Any, node: NodeId, runtime: Runtime) -> Any:
    opened = state.sagas.open.get(node)
    if opened is None:
        return []
    return saga_model.advance(opened, state.parameters, lambda _: Capacity(1_000_000), runtime.clock.now_ns())


async def _ask(runtime: Runtime, node: NodeId, command: bytes) -> None:
    try:
        await runtime.bus.request(runtime.subjects.agent(node), command, ANSWER_S_MAX)
    except (NoReply, Unavailable, ValidationError):
        return
