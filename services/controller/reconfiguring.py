"""After each window: what the policy sees, what it wants, and the plan that comes of it. Pure.

A window is decided on once, right after it has closed; a leader that dies in between leaves that to the next window, for what
is sustained will still be so. A node whose reconfiguration was aborted rests for m windows, so that one that refuses every
time does not keep the others from moving.
"""

from services.controller import paper_policy, saga
from services.controller.capacity import CapacityOf
from services.controller.decider import State
from services.controller.saga import Move
from services.controller.steps import NodeSight, Sight, WorkerSight
from services.controller.windows import capacity_us
from shared.contracts.envelope import EventData
from shared.contracts.events import NodeRegistered, ReconfigurationAdvised, WindowClosed
from shared.model.cost import US_PER_S
from shared.model.pool import Node, Worker

ALTERNATIVES_MAX = 8
"""Steps that a plan names, the taken one first."""


def decide(state: State, capacity_of: CapacityOf) -> list[EventData]:
    """`reconfiguration-planned` after the last window, or `reconfiguration-advised`, or []."""
    window = state.windows.last
    parameters = state.parameters
    if window is None or state.decided_k >= window.k or parameters.frozen or parameters.reconfiguration_policy == "off":
        return []
    move = _paper(sight(state, window, capacity_of), capacity_of)
    if move is None:
        return []
    if parameters.reconfiguration_advisory:
        return [_advice(state, move, window.k)]
    return saga.plan(state.sagas, state.pool, parameters, move)


def sight(state: State, window: WindowClosed, capacity_of: CapacityOf) -> Sight:
    """What a policy may know, all of it folded from the log but κ_C, which plans record."""
    serving = [(node, node.spec) for node in state.pool.nodes.values() if node.alive and node.spec and node.epoch]
    nodes = tuple(_node(state, node, spec, window) for node, spec in sorted(serving, key=lambda each: each[0].id))
    profiled_us = state.parameters.window_s * US_PER_S
    capacities_us = {
        degree: capacity_of(degree).us * window.length_us // profiled_us
        for degree in sorted({degree for node in nodes for degree in node.degrees})
    }
    return Sight(window, state.parameters, nodes, capacities_us, len(state.sagas.open))


def _node(state: State, node: Node, spec: NodeRegistered, window: WindowClosed) -> NodeSight:
    rests = window.k - state.aborted_k.get(node.id, -state.parameters.persistence) < state.parameters.persistence
    return NodeSight(
        node.id,
        node.composition,
        spec.degrees,
        tuple(_worker(state, worker, spec, window) for worker in node.workers),
        cyclic=spec.kv_layout == "cyclic",
        movable=not (node.pinned or node.cordoned or rests or node.id in state.sagas.open),
        rank_tokens=spec.blocks_per_rank * spec.block_tokens,
        prompt_tokens_max=spec.prompt_tokens_max,
    )


def _worker(state: State, worker: Worker, spec: NodeRegistered, window: WindowClosed) -> WorkerSight:
    closed_ns = state.windows.started_ns
    assert closed_ns is not None, "a window has closed, so the next one has begun"
    return WorkerSight(
        worker.group,
        capacity_us(state.windows, worker, window.length_us),
        state.activity.drain_us(worker.id, closed_ns),
        state.activity.reused_tokens.get(worker.id, 0) // spec.block_tokens,
    )


def _paper(seen: Sight, capacity_of: CapacityOf) -> Move | None:
    proposal = paper_policy.propose(seen)
    if proposal is None:
        return None
    best, window = proposal.steps[0], seen.window
    return Move(
        best.node,
        best.composition,
        paper_policy.NAME,
        f"{proposal.signal} for {window.persistence[proposal.signal]} windows",
        alternatives=tuple(each.alternative() for each in proposal.steps[:ALTERNATIVES_MAX]),
        window=window.k,
        capacities_us={degree: capacity_of(degree).us for degree in seen.capacities_us},
    )


def _advice(state: State, move: Move, k: int) -> ReconfigurationAdvised:
    return ReconfigurationAdvised(
        node=move.node,
        policy=move.policy,
        reason=move.reason,
        old_composition=state.pool.nodes[move.node].composition,
        new_composition=move.composition,
        alternatives=move.alternatives,
        forecast_gain=move.forecast_gain,
        window=k,
        capacities_us=dict(move.capacities_us),
    )
