"""The controller's decisions as pure functions of what it has folded.

Everything here goes to the one fenced subject `….control`: who leads, windows, epochs (`epochs.py`, `saga.py`), who is
lost, and what operators ask for. State changes only by folding the log, so a standby's state is the leader's. Every
decision is safe to repeat: what holds already gives [].
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.controller import activity as activity_model
from services.controller import arrivals as arrivals_model
from services.controller import refitting
from services.controller import saga as saga_model
from services.controller import windows as windows_model
from services.controller.activity import Activity
from services.controller.arrivals import Arrivals
from services.controller.refitting import Evidence
from services.controller.saga import Move, Sagas
from services.controller.windows import Windows
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    SERVING,
    CompositionPinned,
    CompositionUnpinned,
    Cordoned,
    EpochAborted,
    ForecastMade,
    Frozen,
    LeadershipTaken,
    NodeDeclaredLost,
    ParametersChanged,
    PrefillCompleted,
    ReconfigurationAdvised,
    ReconfigurationPlanned,
    RequestAssigned,
    RouterLost,
    RouterRegistered,
    Thawed,
    Uncordoned,
)
from shared.contracts.ids import NodeId, RouterId, Source
from shared.model import keepsake as keepsake_model
from shared.model import parameters as parameters_model
from shared.model import pool as pool_model
from shared.model.keepsake import Keepsake
from shared.model.lattice import Composition
from shared.model.parameters import Parameters
from shared.model.pool import Pool


class UnknownNode(ValueError):
    """An operator named a node that never registered."""


class NotNow(ValueError):
    """What an operator asked for cannot be planned as things stand; the message says why."""


OPERATOR = "operator"
"""The policy of a plan that a person asked for."""


class Promised(NamedTuple):
    """The last window after which a forecast moved nodes, and its mean TTFT."""

    k: int
    ttft_us: int | None


@dataclass(slots=True)
class State:
    """What the log says, up to `seen_seq`. `routers` are the processes that have registered and are not lost. `decided_k` is
    the last window that a policy moved something after, `aborted_k` the last one before each node's abort."""

    pool: Pool = field(default_factory=Pool)
    parameters: Parameters = field(default_factory=Parameters)
    windows: Windows = field(default_factory=Windows)
    sagas: Sagas = field(default_factory=Sagas)
    activity: Activity = field(default_factory=Activity)
    arrivals: Arrivals = field(default_factory=Arrivals)
    evidence: Evidence = field(default_factory=Evidence)
    forecast: ForecastMade | None = None
    promised: Promised | None = None
    keepsake: Keepsake = field(default_factory=Keepsake)
    routers: dict[Source, RouterId] = field(default_factory=dict)
    decided_k: int = 0
    aborted_k: dict[NodeId, int] = field(default_factory=dict)
    term: int = 0
    leader: str | None = None
    seen_seq: int = 0


class Incarnation(NamedTuple):
    """One life of a node."""

    node: NodeId
    number: int


class Asker(NamedTuple):
    """Who asked for something, and why."""

    asked_by: str
    reason: str


def initial() -> State:
    """Before the first event."""
    return State()


def evolve(state: State, stored: Stored) -> None:
    """Fold one event."""
    data = stored.data
    serving = type(data) in SERVING
    if not serving:
        pool_model.evolve(state.pool, stored)
        saga_model.evolve(state.sagas, stored, state.pool)
    windows_model.evolve(state.windows, stored, state.parameters)
    activity_model.evolve(state.activity, stored)
    if not serving or isinstance(data, RequestAssigned):
        arrivals_model.evolve(state.arrivals, stored)
    if not serving or isinstance(data, PrefillCompleted):
        refitting.evolve(state.evidence, stored, state.pool)
    keepsake_model.evolve(state.keepsake, stored)
    state.seen_seq = max(state.seen_seq, stored.stream_seq)
    if serving:
        return
    state.parameters = parameters_model.evolve(state.parameters, stored)
    match data:
        case LeadershipTaken():
            state.term, state.leader = data.term, data.leader
        case RouterRegistered():
            state.routers[stored.event.source] = data.router
        case RouterLost():
            state.routers.pop(Source(data.source), None)
        case ReconfigurationPlanned() | ReconfigurationAdvised() if data.window is not None:
            state.decided_k = data.window
            if data.forecast_gain is not None and state.windows.last is not None:
                state.promised = Promised(data.window, state.windows.last.mean_ttft_us)
        case ForecastMade():
            state.forecast = data
        case EpochAborted():
            state.aborted_k[data.node] = state.windows.k
        case _:
            pass


def take_leadership(
    state: State, leader: str, lease_term: int, first_seq: int = 1, kept_events: int = 0, *, resumes: bool = True
) -> LeadershipTaken:
    """The first event of a term: above every term of the log, even if the lease has begun to count anew. The fold of this
    process began at `first_seq`, with so many kept events. `resumes` is False only in old records."""
    term = max(lease_term, state.term + 1)
    return LeadershipTaken(leader=leader, term=term, first_seq=first_seq, kept_events=kept_events, resumes=resumes)


def close_window(state: State, now_ns: int) -> list[EventData]:
    """`window-closed`, once the window has lasted H."""
    started_ns = state.windows.started_ns
    if started_ns is None or now_ns - started_ns < state.parameters.window_s * 10**9:
        return []
    length_us = (now_ns - started_ns) // 1_000
    return [windows_model.close(state.windows, state.pool, state.parameters, state.seen_seq, length_us)]


def refit(state: State) -> list[EventData]:
    """`calibration-updated`, if operators let coefficients follow what is measured and it says something else."""
    return [*refitting.decide(state.evidence, state.seen_seq)] if state.parameters.refit else []


def living_nodes(state: State) -> set[Incarnation]:
    """Whom heartbeats are expected of."""
    return {Incarnation(node.id, node.incarnation) for node in state.pool.nodes.values() if node.alive}


def lose_nodes(state: State, silent_us: Mapping[Incarnation, int]) -> list[EventData]:
    """`node-declared-lost` for each silent node that still lives."""
    return [
        NodeDeclaredLost(node=each.node, incarnation=each.number, silent_us=silent_us[each])
        for each in sorted(silent_us.keys() & living_nodes(state))
    ]


def lose_routers(state: State, silent: Collection[Source]) -> list[EventData]:
    """`router-lost` for each silent router process that is not lost yet. It ends that process's open requests."""
    return [
        RouterLost(router=state.routers[source], source=source) for source in sorted(set(silent) & state.routers.keys())
    ]


def freeze(state: State, asker: Asker) -> list[EventData]:
    """`frozen`, unless the pool is."""
    return [] if state.parameters.frozen else [Frozen(asked_by=asker.asked_by, reason=asker.reason)]


def thaw(state: State, asker: Asker) -> list[EventData]:
    """`thawed`, if the pool is frozen."""
    return [Thawed(asked_by=asker.asked_by, reason=asker.reason)] if state.parameters.frozen else []


def cordon(state: State, node: NodeId, asker: Asker) -> list[EventData]:
    """`cordoned`, unless the node is. UnknownNode lists the known ones."""
    if _known(state, node).cordoned:
        return []
    return [Cordoned(node=node, asked_by=asker.asked_by, reason=asker.reason)]


def uncordon(state: State, node: NodeId, asker: Asker) -> list[EventData]:
    """`uncordoned`, if the node is cordoned. UnknownNode lists the known ones."""
    if not _known(state, node).cordoned:
        return []
    return [Uncordoned(node=node, asked_by=asker.asked_by, reason=asker.reason)]


def pin(state: State, node: NodeId, asker: Asker) -> list[EventData]:
    """`composition-pinned`, unless it is. UnknownNode lists the known ones."""
    if _known(state, node).pinned:
        return []
    return [CompositionPinned(node=node, asked_by=asker.asked_by, reason=asker.reason)]


def unpin(state: State, node: NodeId, asker: Asker) -> list[EventData]:
    """`composition-unpinned`, if it is pinned. UnknownNode lists the known ones."""
    if not _known(state, node).pinned:
        return []
    return [CompositionUnpinned(node=node, asked_by=asker.asked_by, reason=asker.reason)]


def reconfigure(state: State, node: NodeId, composition: Composition, asker: Asker) -> list[EventData]:
    """`reconfiguration-planned`, unless the node has this composition. Errors: UnknownNode; NotNow."""
    if _known(state, node).composition == composition and node not in state.sagas.open:
        return []
    return _planned(state, Move(node, composition, OPERATOR, asker.reason, asked_by=asker.asked_by))


def drain(state: State, node: NodeId, asker: Asker) -> list[EventData]:
    """The node is cordoned, and every worker of it drained by way of a new epoch of the same composition: what is queued there
    is placed elsewhere, what runs ends, caches stay. Errors: UnknownNode; NotNow."""
    composition = _known(state, node).composition
    move = Move(node, composition, OPERATOR, asker.reason, asked_by=asker.asked_by, renews=True)
    return [*cordon(state, node, asker), *_planned(state, move)]


def _planned(state: State, move: Move) -> list[EventData]:
    if why := saga_model.obstacle(state.sagas, state.pool, state.parameters, move):
        raise NotNow(why)
    return saga_model.plan(state.sagas, state.pool, state.parameters, move)


def change_parameters(state: State, changes: Mapping[str, Any], asker: Asker) -> list[EventData]:
    """`parameters-changed` with those of `changes` that differ from what holds.

    Errors: ValueError (pydantic's ValidationError included) names the field and its limit.
    """
    asked = parameters_model.changed(state.parameters, changes)
    now, wanted = (each.model_dump(mode="json") for each in (state.parameters, asked))
    differing = {name: wanted[name] for name in changes if wanted[name] != now[name]}
    if not differing:
        return []
    return [
        ParametersChanged(
            parameters_version=asked.version, changes=differing, asked_by=asker.asked_by, reason=asker.reason
        )
    ]


def _known(state: State, node: NodeId) -> pool_model.Node:
    if node not in state.pool.nodes:
        raise UnknownNode(f"node: {node!r} is not one of {sorted(state.pool.nodes)}")
    return state.pool.nodes[node]
