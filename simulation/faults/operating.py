"""What operators and policies ask of a pool in a scenario. Who leads then decides it, by its own rules."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.controller import decider
from services.controller import hosting as controller
from services.controller.decider import Asker, NotNow, State, UnknownNode
from shared.contracts.envelope import EventData
from shared.contracts.ids import NodeId
from shared.model.lattice import Composition
from shared.runtime.leadership import NotLeading
from simulation.faults.scenario import COMPOSITIONS, Ask
from simulation.faults.scene import Scene, within_life

LASTS_S = 1.5
"""How long a freeze or a cordon is left in place."""

ASKER = Asker("operator", "the scenario says so")

CHANGES: tuple[dict[str, Any], ...] = (
    {"worker_order": "fcfs"},
    {"placement_policy": "least-work", "attempts_max": 2},
    {"placement_policy": "vertumnus"},
    {"placement_policy": "vertumnus", "fetch_mb_per_s": 1_000_000},
    {"placement_policy": "vertumnus", "cache_policy": "regret", "copy_price_s": 0.0001},
    {"cache_policy": "paper", "theta_inter": 0.002, "theta_intra": 1.0, "theta_reclaim": 0.5},
    {"window_s": 1, "persistence": 1, "down": 0.2, "up": 0.3},
)
"""Policies that scenarios try, with thresholds that a handful of short requests reaches."""

TENANTS: tuple[dict[str, Any], ...] = (
    {"tenants": {"many": {}, "few": {"weight": 3}}, "share_s": 0},
    {
        "tenants": {"many": {"queued_tokens_max": 300}, "few": {"requests_max": 1}, "*": {}},
        "share_s": 0.1,
        "held_s_max": 3,
    },
    {"tenants": {"many": {"slo_ms": 500, "hard_slo": True}, "few": {"tokens_per_minute": 2_000}}, "share_s": 0},
)
"""What tenants may have, so little of it that they meet every limit, and wait for their turns."""

Proposal = Callable[[State], Sequence[EventData]]


async def ask(scene: Scene, asked: Ask) -> None:
    """Ask at its time; nothing comes of it if nobody leads then. What would keep the pool from serving is taken back."""
    await asyncio.sleep(asked.at_s)
    node = NodeId(scene.scenario.shape.nodes[asked.node])
    match asked.kind:
        case "reconfigure":
            composition = _composition(scene, asked)
            await _propose(scene, lambda state: decider.reconfigure(state, node, composition, ASKER))
        case "drain":
            await _propose(scene, lambda state: decider.drain(state, node, ASKER))
            await asyncio.sleep(LASTS_S)
            await _insist(scene, lambda state: decider.uncordon(state, node, ASKER))
        case "freeze":
            await _propose(scene, lambda state: decider.freeze(state, ASKER))
            await asyncio.sleep(LASTS_S)
            await _insist(scene, lambda state: decider.thaw(state, ASKER))
        case "cordon":
            await _propose(scene, lambda state: decider.cordon(state, node, ASKER))
            await asyncio.sleep(LASTS_S)
            await _insist(scene, lambda state: decider.uncordon(state, node, ASKER))
        case "parameters":
            changes = CHANGES[int(asked.choice * len(CHANGES))]
            await _propose(scene, lambda state: decider.change_parameters(state, changes, ASKER))
        case "tenants":
            given = TENANTS[int(asked.choice * len(TENANTS))]
            await _propose(scene, lambda state: decider.change_parameters(state, given, ASKER))


def _composition(scene: Scene, asked: Ask) -> Composition:
    """Any composition of as many ranks, perhaps the present one: then nothing comes of it."""
    ranks = sum(scene.scenario.shape.compositions[asked.node])
    fitting = [each for each in COMPOSITIONS if sum(each) == ranks]
    return fitting[int(asked.choice * len(fitting))]


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
    except (UnknownNode, NotNow):
        return True  # refused, as operators are
    return True
