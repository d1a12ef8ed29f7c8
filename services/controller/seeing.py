"""What a policy may see of a pool, out of what the controller has folded.

A node whose reconfiguration was aborted rests for m windows, so that one that refuses every time does not keep the others
from moving.
"""

from services.controller.capacity import CapacityOf
from services.controller.decider import State
from services.controller.steps import NodeSight, Sight, WorkerSight
from services.controller.windows import capacity_us
from shared.contracts.events import NodeRegistered, WindowClosed
from shared.model.cost import US_PER_S
from shared.model.pool import Node, Worker


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
        tuple(degree for degree in spec.degrees if degree >= spec.degree_min),
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
