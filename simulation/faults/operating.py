"""What operators and policies ask of a pool in a scenario. Who leads then decides it, by its own rules."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.controller import decider, saga
from services.controller import hosting as controller
from services.controller.decider import Asker, State, UnknownNode
from shared.contracts.envelope import EventData
from shared.contracts.ids import NodeId
from shared.runtime.leadership import NotLeading
from simulation.faults.scenario import COMPOSITIONS, Ask
from simulation.faults.scene import Scene, within_life

LASTS_S = 1.5
"""How long a freeze or a cordon is left in place."""

ASKER = Asker("operator", "the scenario says so")

Proposal = Callable[[State], Sequence[EventData]]


async def ask(scene: Scene, asked: Ask) -> None:
    """Ask at its time; nothing comes of it if nobody leads then."""
    await asyncio.sleep(asked.at_s)
    node = NodeId(scene.scenario.shape.nodes[asked.node])
    match asked.kind:
        case "reconfigure":
            await _propose(scene, lambda state: _move(state, node, asked.choice))
        case "freeze":
            await _propose(scene, lambda state: decider.freeze(state, ASKER))
            await asyncio.sleep(LASTS_S)
            await _insist(scene, lambda state: decider.thaw(state, ASKER))
        case "cordon":
            await _propose(scene, lambda state: decider.cordon(state, node, ASKER))
            await asyncio.sleep(LASTS_S)
            await _insist(scene, lambda state: decider.uncordon(state, node, ASKER))
        case "parameters":
            changes: dict[str, Any] = (
                {"worker_order": "fcfs"} if asked.choice < 0.5 else {"placement_policy": "least-work"}
            )
            await _propose(scene, lambda state: decider.change_parameters(state, changes, ASKER))


def _move(state: State, node: NodeId, choice: float) -> Sequence[EventData]:
    """Any composition of as many ranks, the present one included: then nothing is planned."""
    known = state.pool.nodes.get(node)
    fitting = [each for each in COMPOSITIONS if known is not None and sum(each) == sum(known.composition)]
    if not fitting:
        return []
    move = saga.Move(node, fitting[int(choice * len(fitting))], "operator", ASKER.reason)
    return saga.plan(state.sagas, state.pool, state.parameters, move)


async def _insist(scene: Scene, proposal: Proposal) -> None:
    """Until somebody has decided it."""
    while True:
        if await _propose(scene, proposal):
            return
        await asyncio.sleep(LASTS_S)


async def _propose(scene: Scene, proposal: Proposal) -> bool:
    """Whether a leader has decided it, to whatever end."""
    for place, hosted in scene.hosted(controller.Hosted):
        if hosted.leadership.term is None or place.process is None:
            continue
        work = place.process.run(_decide(hosted, proposal))
        return await within_life(place, work) and work.result()
    return False


async def _decide(hosted: controller.Hosted, proposal: Proposal) -> bool:
    try:
        await hosted.leadership.decide(lambda: proposal(hosted.state))
    except NotLeading:
        return False
    except UnknownNode:
        return True  # it has not come up yet, so there is nothing to cordon
    return True
