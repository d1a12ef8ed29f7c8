"""The two roles that lead, and how each of their decisions is made again.

What came from outside is taken from the record: clocks, operators' words, who was silent, which composition was configured.
What follows from it and from the folded state is the deciders' business, and is asked of them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from replay.beginnings import Beginning
from replay.leaders import Role
from services.cachemgr import decider as cachemgr
from services.controller import decider as controller
from services.controller import epochs, forecasting, reconfiguring, replaying, saga
from services.controller.capacity import Capacity
from services.controller.decider import Asker, Incarnation
from services.controller.forecast import Scores
from shared.contracts.envelope import Channel, EventData, Stored
from shared.contracts.events import (
    CacheLeadershipTaken,
    CacheScanCompleted,
    CalibrationUpdated,
    CompositionPinned,
    CompositionUnpinned,
    Cordoned,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    ForecastMade,
    Frozen,
    LeadershipTaken,
    NodeDeclaredLost,
    ParametersChanged,
    PlacementReconciled,
    ReclamationFailed,
    ReclamationRequested,
    ReconfigurationAdvised,
    ReconfigurationPlanned,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
    ReplicationRequested,
    RouterLost,
    Thawed,
    Uncordoned,
    WindowClosed,
)
from shared.contracts.ids import Source
from shared.model.cost import Coefficients

Decisions = Sequence[EventData]


def _control(state: controller.State, stored: Stored) -> Decisions:
    match stored.data:
        case LeadershipTaken() as data:
            began = (data.first_seq, data.kept_events)
            return [controller.take_leadership(state, data.leader, data.term, *began, resumes=data.resumes)]
        case WindowClosed() as data:
            if state.seen_seq != data.to_seq or state.windows.started_ns is None:
                return []
            return controller.close_window(state, state.windows.started_ns + data.length_us * 1_000)
        case CalibrationUpdated() as data:
            return controller.refit(state) if state.seen_seq == data.to_seq else []
        case NodeDeclaredLost() as data:
            return controller.lose_nodes(state, {Incarnation(data.node, data.incarnation): data.silent_us})
        case RouterLost() as data:
            return controller.lose_routers(state, [Source(data.source)])
        case EpochCommitted() | EpochAborted() | DrainStarted() as data:
            return _epoch(state, stored, data)
        case ForecastMade() as data:
            return _forecast(state, data, Scores(data.scores_ppm, data.errors_ppm))
        case ReconfigurationPlanned() | ReconfigurationAdvised() as data if data.window is not None:
            return _policy(state, data)
        case _:
            return _operator(state, stored.data)


def _epoch(state: controller.State, stored: Stored, data: EpochCommitted | EpochAborted | DrainStarted) -> Decisions:
    workers = data.workers if isinstance(data, EpochCommitted) else ()
    capacities = {each.degree: Capacity(each.capacity_us, each.capacity_version) for each in workers}

    def capacity_of(degree: int) -> Capacity:
        return capacities.get(degree, Capacity(0))

    if opened := state.sagas.open.get(data.node):
        refusal = _refusal(data.reason) if isinstance(data, EpochAborted) else None
        return saga.advance(opened, state.parameters, capacity_of, stored.event.time_ns, refusal)
    node = state.pool.nodes.get(data.node)
    if node is None or not isinstance(data, EpochCommitted):
        return []
    adopted = epochs.Wanted(data.node, node.incarnation, data.epoch, data.composition)
    return epochs.commit(state, adopted, capacity_of)


def _refusal(reason: str) -> str | None:
    """What the agent answered, if the abort says so."""
    return reason.removeprefix(saga.REFUSED) if reason.startswith(saga.REFUSED) else None


def _policy(state: controller.State, data: ReconfigurationPlanned | ReconfigurationAdvised) -> Decisions:
    """The policy again, after the window that it decided after and with the κ_C that it counted with."""
    if state.windows.k != data.window:
        return []
    return reconfiguring.decide(state, lambda degree: Capacity(data.capacities_us.get(degree, 0)))


def _forecast(state: controller.State, data: ForecastMade, scores: Scores) -> Decisions:
    """The same question; the answer as recorded, or asked for anew."""
    if state.windows.k != data.window:
        return []
    asked = forecasting.ask(state, Coefficients.model_validate(data.coefficients))
    return forecasting.made(state, asked, scores) if asked else []


# One question may be that of many states, where none of them gives what is recorded.
_scores = lru_cache(maxsize=8)(replaying.scores)


def _control_deep(state: controller.State, stored: Stored) -> Decisions:
    """The same, with every forecast replayed: half a second for each."""
    if not isinstance(stored.data, ForecastMade):
        return _control(state, stored)
    asked = forecasting.ask(state, Coefficients.model_validate(stored.data.coefficients))
    return _forecast(state, stored.data, _scores(asked.question)) if asked else []


def _plan_of_operator(state: controller.State, data: ReconfigurationPlanned) -> Decisions:
    """What a person asked for follows from nothing; that it could be planned, and as which epoch, does."""
    move = saga.Move(
        data.node,
        data.new_composition,
        data.policy,
        data.reason,
        asked_by=data.asked_by,
        renews=data.new_composition == data.old_composition,
    )
    return saga.plan(state.sagas, state.pool, state.parameters, move)


def _operator(state: controller.State, data: EventData) -> Decisions:
    try:
        match data:
            case Frozen():
                return controller.freeze(state, Asker(data.asked_by, data.reason))
            case Thawed():
                return controller.thaw(state, Asker(data.asked_by, data.reason))
            case Cordoned():
                return controller.cordon(state, data.node, Asker(data.asked_by, data.reason))
            case Uncordoned():
                return controller.uncordon(state, data.node, Asker(data.asked_by, data.reason))
            case CompositionPinned():
                return controller.pin(state, data.node, Asker(data.asked_by, data.reason))
            case CompositionUnpinned():
                return controller.unpin(state, data.node, Asker(data.asked_by, data.reason))
            case ReconfigurationPlanned():
                return _plan_of_operator(state, data)
            case ParametersChanged():
                return controller.change_parameters(state, data.changes, Asker(data.asked_by, data.reason))
            case _:
                return []
    except ValueError:
        # The decider refuses what was asked: no such node, no such value. So this is decided: nothing.
        return []


class _Scans:
    """The scan of the state that was scanned last. What it has chosen follows it in the record and is looked for in it alone:
    of all states that the leader may have had, the scan names its own, and to scan each of them would take hours."""

    def __init__(self) -> None:
        self._of: tuple[cachemgr.State | None, int] = None, 0
        self._decisions: Decisions = ()

    def on(self, state: cachemgr.State, rules: int) -> Decisions:
        self._of, self._decisions = (state, state.seen_seq), cachemgr.scan(state, rules)
        return self._decisions

    def last_on(self, state: cachemgr.State) -> Decisions:
        """[] if it was another state's."""
        return self._decisions if self._of[0] is state and self._of[1] == state.seen_seq else []


_SCANS = _Scans()


def _cache(state: cachemgr.State, stored: Stored) -> Decisions:
    match stored.data:
        case CacheLeadershipTaken() as data:
            began = cachemgr.Began(data.first_seq, data.kept_events, Coefficients.model_validate(data.coefficients))
            return [cachemgr.take_leadership(state, data.leader, data.term, began)]
        case CacheScanCompleted() as data:
            return _SCANS.on(state, data.rules) if state.seen_seq == data.to_seq else []
        case PlacementReconciled():
            return cachemgr.reconcile_placements(state)
        case ReplicationRequested() | ReclamationRequested():
            return _SCANS.last_on(state)
        case ReplicationFailed(reason=reason) | ReclamationFailed(reason=reason) if reason not in cachemgr.OWN_REASONS:
            return cachemgr.settle(state, stored.event.time_ns, {stored.data.operation: reason})
        case ReplicaInstalled() | ReplicationFailed() | ReplicaReclaimed() | ReclamationFailed():
            return cachemgr.settle(state, stored.event.time_ns, {})
        case _:
            return []


def _cache_manager(begun: Beginning) -> cachemgr.State | None:
    coefficients = begun.cost_model()
    return cachemgr.initial(coefficients, derives=True) if coefficients else None


def _deciding(derive: Any, *types: type[EventData]) -> dict[type[EventData], Any]:
    return dict.fromkeys(types, derive)


CONTROL_DECISIONS = (
    LeadershipTaken, WindowClosed, NodeDeclaredLost, RouterLost, EpochCommitted, EpochAborted, DrainStarted, ForecastMade,
    ReconfigurationPlanned, ReconfigurationAdvised, Frozen, Thawed, Cordoned, Uncordoned, CompositionPinned,
    CompositionUnpinned, ParametersChanged, CalibrationUpdated,
)  # fmt: skip
"""`NodeDeclaredLost` and `RouterLost` are decided by it, whatever file their classes are in."""


def controller_role(*, deep: bool = False) -> Role:
    """`deep`: forecasts are replayed, instead of taken as they were answered."""
    return Role(
        Channel.CONTROL,
        frozenset({Channel.CONTROL, Channel.CACHE_CONTROL, Channel.WORKERS, Channel.REQUESTS}),
        lambda _: controller.initial(),
        controller.evolve,
        _deciding(_control_deep if deep else _control, *CONTROL_DECISIONS),
    )


CACHE_MANAGER = Role(
    Channel.CACHE_CONTROL,
    frozenset({Channel.CONTROL, Channel.CACHE_CONTROL, Channel.WORKERS, Channel.CACHE, Channel.REQUESTS}),
    _cache_manager,
    cachemgr.evolve,
    _deciding(
        _cache, CacheLeadershipTaken, CacheScanCompleted, PlacementReconciled, ReplicationRequested, ReplicaInstalled,
        ReplicationFailed, ReclamationRequested, ReplicaReclaimed, ReclamationFailed,
    ),
)  # fmt: skip
