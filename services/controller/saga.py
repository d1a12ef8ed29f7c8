"""One node moves from one composition to another: an audited saga with a limit on every step and a way back from each.

    planned ──drain-started──▶ draining ──drain-completed──▶ switching ──every rank adopted──▶ reconciling
                                                                        ──placement-reconciled──▶ epoch-committed
    any step ──limit passed, node lost──▶ epoch-aborted          planned, draining ──frozen──▶ epoch-aborted
    draining, switching ──agent refuses──▶ epoch-aborted
    planned, switching, reconciling ──another leader──▶ the same, with its limit anew

Every step is an event of whoever took it, so a new leader that folds the log knows where the saga stands: `orders` says
what to ask of the agent, `advance` what to decide. Both may be repeated. An epoch number is used once: the abort of a saga
whose ranks had adopted already leaves it behind, and `epochs.wanted` takes the node forward to its old composition.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, assert_never

from services.controller.capacity import CapacityOf
from services.controller.misfits import misfit, too_small
from shared.contracts.commands import Adopt, Drain
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    Alternative,
    CommittedWorker,
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    PlacementReconciled,
    RankAdoptedEpoch,
    ReconfigurationPlanned,
)
from shared.contracts.ids import NodeId, WorkerId, worker_id
from shared.model.cost import US_PER_S
from shared.model.lattice import Composition, Group, groups_of
from shared.model.parameters import Parameters
from shared.model.pool import Node, Pool

Step = Literal["planned", "draining", "switching", "reconciling"]

PLANNED_S_MAX, SWITCHING_S_MAX, RECONCILING_S_MAX = 1.0, 2.0, 2.0
"""Limits of the steps that nobody tunes; `parameters.drain_s_max` limits the drain."""

RESUMED_MAX = 3
"""How many leaders give a step its limit anew: the workers that have drained for it stand idle until it ends."""

REFUSED = "refused: "
"""How the reason of an abort begins that the agent asked for."""


@dataclass(slots=True)
class Saga:
    """One reconfiguration under way. `since_ns` is when its step began, by the clock of the event that began it, or when
    another leader took it over: it was `resumed` so often."""

    plan: ReconfigurationPlanned
    incarnation: int
    since_ns: int
    step: Step = "planned"
    drain_us: int = 0
    switch_us: int = 0
    adopted: set[int] = field(default_factory=set)
    reconciled: bool = False
    broken: str | None = None
    resumed: int = 0


@dataclass(slots=True)
class Sagas:
    """State of the fold. `last_epoch` is the highest epoch that was planned or committed on each node."""

    open: dict[NodeId, Saga] = field(default_factory=dict)
    last_epoch: dict[NodeId, int] = field(default_factory=dict)


class Move(NamedTuple):
    """A composition that a node is to have, and why. Policies say what else they considered, operators who they are.
    `renews`: every worker retires, also where its ranks stay together."""

    node: NodeId
    composition: Composition
    policy: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()
    forecast_gain: float | None = None
    window: int | None = None
    capacities_us: Mapping[int, int] = {}
    asked_by: str | None = None
    renews: bool = False


def evolve(sagas: Sagas, stored: Stored, pool: Pool) -> None:
    """Fold one event into the saga of its node. `pool` has folded it already."""
    data, now_ns = stored.data, stored.event.time_ns
    match data:
        case ReconfigurationPlanned():
            sagas.open[data.node] = Saga(data, _node(pool, data.node).incarnation, now_ns)
            sagas.last_epoch[data.node] = data.epoch
        case EpochCommitted() | EpochAborted():
            sagas.open.pop(data.node, None)
            sagas.last_epoch[data.node] = max(data.epoch, sagas.last_epoch.get(data.node, 0))
        case (
            DrainStarted() | DrainCompleted() | RankAdoptedEpoch() | PlacementReconciled() | NodeLost()
            | NodeDeclaredLost() | NodeRegistered()
        ) if saga := sagas.open.get(data.node):  # fmt: skip
            _step(saga, data, now_ns, _node(pool, data.node))
        case LeadershipTaken(resumes=True):
            for saga in sagas.open.values():
                _resume(saga, now_ns)
        case _:
            pass


def _node(pool: Pool, node: NodeId) -> Node:
    """A blank one if the log no longer tells of it: then its saga breaks, or a limit ends it."""
    return pool.nodes.get(node) or Node(node)


def _step(saga: Saga, data: EventData, now_ns: int, node: Node) -> None:
    match data:
        case DrainStarted() if saga.step == "planned":
            saga.step, saga.since_ns = "draining", now_ns
        case DrainCompleted() if saga.step == "draining" and set(data.workers) == set(saga.plan.retiring):
            saga.step, saga.since_ns, saga.drain_us = "switching", now_ns, data.drain_us
        case RankAdoptedEpoch(epoch=saga.plan.epoch, incarnation=saga.incarnation) if saga.step == "switching":
            saga.adopted.add(data.rank)
            saga.switch_us = max(saga.switch_us, data.switch_us)
            if len(saga.adopted) == sum(saga.plan.new_composition):
                saga.step, saga.since_ns = "reconciling", now_ns
        case PlacementReconciled(epoch=saga.plan.epoch):
            saga.reconciled = True
        case NodeLost() | NodeDeclaredLost() | NodeRegistered() if (
            not node.alive or node.incarnation != saga.incarnation
        ):
            saga.broken = "node-lost"
        case _:
            pass


def _resume(saga: Saga, now_ns: int) -> None:
    """Nobody has led for a while, so nobody has asked for the step or decided the next one. A drain went on all the same."""
    if saga.step != "draining" and saga.resumed < RESUMED_MAX:
        saga.since_ns, saga.resumed = max(saga.since_ns, now_ns), saga.resumed + 1


def obstacle(sagas: Sagas, pool: Pool, parameters: Parameters, move: Move) -> str | None:
    """Why `move` cannot be planned now, or None."""
    node = pool.nodes.get(move.node)
    if node is None or node.spec is None or not node.alive or not node.epoch:
        return f"node {move.node} does not serve"
    if parameters.frozen:
        return "the pool is frozen"
    if move.node in sagas.open:
        return f"node {move.node} is being reconfigured"
    if len(sagas.open) >= parameters.reconfigurations_max:
        return (
            f"{len(sagas.open)} nodes are being reconfigured; reconfigurations_max is {parameters.reconfigurations_max}"
        )
    if move.composition == node.composition and not move.renews:
        return f"node {move.node} has this composition"
    return misfit(node.spec, move.composition) or too_small(node, node.spec, move.composition)


def plan(sagas: Sagas, pool: Pool, parameters: Parameters, move: Move) -> list[EventData]:
    """`reconfiguration-planned`, or [] if there is an `obstacle`. Workers whose ranks stay together do not retire."""
    if obstacle(sagas, pool, parameters, move):
        return []
    node = pool.nodes[move.node]
    epoch = max(node.epoch, sagas.last_epoch.get(node.id, 0)) + 1
    old, new = set(groups_of(node.composition)), set(groups_of(move.composition))
    return [
        ReconfigurationPlanned(
            node=node.id,
            epoch=epoch,
            policy=move.policy,
            reason=move.reason,
            old_composition=node.composition,
            new_composition=move.composition,
            retiring=_ids(node.id, node.epoch, old if move.renews else old - new),
            coming=_ids(node.id, epoch, new if move.renews else new - old),
            alternatives=move.alternatives,
            forecast_gain=move.forecast_gain,
            window=move.window,
            capacities_us=dict(move.capacities_us),
            asked_by=move.asked_by,
        )
    ]


def advance(
    saga: Saga, parameters: Parameters, capacity_of: CapacityOf, now_ns: int, refusal: str | None = None
) -> list[EventData]:
    """What the leader decides next: the next step, the commit, the abort, or nothing yet. `refusal` is the agent's, of an
    order of this step."""
    plan = saga.plan
    if reason := _why_abort(saga, parameters, now_ns, refusal):
        return [EpochAborted(node=plan.node, epoch=plan.epoch, step=saga.step, reason=reason)]
    if saga.step == "planned":
        deadline_us = _limit_us("draining", parameters)
        return [DrainStarted(node=plan.node, epoch=plan.epoch, workers=plan.retiring, deadline_us=deadline_us)]
    if saga.step == "reconciling" and saga.reconciled:
        return [
            EpochCommitted(
                node=plan.node,
                epoch=plan.epoch,
                composition=plan.new_composition,
                workers=committed_workers(plan.node, plan.epoch, plan.new_composition, capacity_of),
                drain_us=saga.drain_us,
                switch_us=saga.switch_us,
            )
        ]
    return []


def orders(saga: Saga, parameters: Parameters, term: int) -> Drain | Adopt | None:
    """What to ask of the node's agent at this step. Agents take repeated orders."""
    plan = saga.plan
    match saga.step:
        case "draining":
            deadline_us = _limit_us("draining", parameters)
            return Drain(term=term, epoch=plan.epoch, workers=plan.retiring, deadline_us=deadline_us)
        case "switching":
            return Adopt(
                term=term,
                node=plan.node,
                incarnation=saga.incarnation,
                epoch=plan.epoch,
                composition=plan.new_composition,
            )
        case "planned" | "reconciling":
            return None
        case _:
            assert_never(saga.step)


def committed_workers(
    node: NodeId, epoch: int, composition: Composition, capacity_of: CapacityOf
) -> tuple[CommittedWorker, ...]:
    """The workers of an epoch, from rank 0 up."""
    carried = {degree: capacity_of(degree) for degree in composition}
    return tuple(
        CommittedWorker(
            worker=worker_id(node, epoch, group.first_rank),
            first_rank=group.first_rank,
            degree=group.degree,
            capacity_us=carried[group.degree].us,
            capacity_version=carried[group.degree].version,
        )
        for group in groups_of(composition)
    )


def _ids(node: NodeId, epoch: int, groups: set[Group]) -> tuple[WorkerId, ...]:
    return tuple(worker_id(node, epoch, group.first_rank) for group in sorted(groups))


def _why_abort(saga: Saga, parameters: Parameters, now_ns: int, refusal: str | None) -> str | None:
    if saga.broken:
        return saga.broken
    if parameters.frozen and saga.step in ("planned", "draining"):
        return "frozen"
    if saga.step == "reconciling" and saga.reconciled:
        return None
    if refusal is not None and saga.step in ("draining", "switching"):
        # The agent has gone back by itself; waiting for the limit would only keep its workers idle.
        return f"{REFUSED}{refusal}"
    waited_us = (now_ns - saga.since_ns) // 1_000
    limit_us = _limit_us(saga.step, parameters)
    return f"took longer than {limit_us / US_PER_S:g} s" if waited_us > limit_us else None


def _limit_us(step: Step, parameters: Parameters) -> int:
    limits_s: dict[Step, float] = {
        "planned": PLANNED_S_MAX,
        "draining": parameters.drain_s_max,
        "switching": SWITCHING_S_MAX,
        "reconciling": RECONCILING_S_MAX,
    }
    return round(limits_s[step] * US_PER_S)
