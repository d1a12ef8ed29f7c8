"""After each window: what the policy sees, what it wants, and the plan that comes of it. Pure.

A window is decided on once, right after it has closed; a leader that dies in between leaves that to the next window, for what
is sustained will still be so. A forecast takes a moment in a process of its own: its plans follow `forecast-made`.
"""

from services.controller import forecasting, paper_policy, saga
from services.controller.capacity import CapacityOf
from services.controller.decider import State
from services.controller.saga import Move
from services.controller.seeing import sight
from services.controller.steps import Sight
from shared.contracts.envelope import EventData
from shared.contracts.events import ReconfigurationAdvised

ALTERNATIVES_MAX = 8
"""Steps that a plan names, the taken one first."""


def decide(state: State, capacity_of: CapacityOf) -> list[EventData]:
    """`reconfiguration-planned` after the last window, or `reconfiguration-advised`, or []."""
    window = state.windows.last
    parameters = state.parameters
    if window is None or state.decided_k >= window.k or parameters.frozen or parameters.reconfiguration_policy == "off":
        return []
    seen = sight(state, window, capacity_of)
    moves = forecasting.moves(state, seen) if parameters.reconfiguration_policy == "forecast" else _paper(seen)
    counted = {degree: capacity_of(degree).us for degree in seen.capacities_us}
    moves = [each._replace(window=window.k, capacities_us=counted) for each in moves]
    if parameters.reconfiguration_advisory:
        return [_advice(state, each, window.k) for each in moves]
    room = parameters.reconfigurations_max - len(state.sagas.open)
    return [plan for each in moves[:room] for plan in saga.plan(state.sagas, state.pool, parameters, each)]


def _paper(seen: Sight) -> list[Move]:
    proposal = paper_policy.propose(seen)
    if proposal is None:
        return []
    best = proposal.steps[0]
    reason = f"{proposal.signal} for {seen.window.persistence[proposal.signal]} windows"
    alternatives = tuple(each.alternative() for each in proposal.steps[:ALTERNATIVES_MAX])
    return [Move(best.node, best.composition, paper_policy.NAME, reason, alternatives)]


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
