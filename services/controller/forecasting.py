"""A forecast from question to plan: what is asked of a replay after a window, the record of its answer, the moves it calls for.

The question is as of the window's end. The answer takes a moment; if the pool, the parameters or the window are others by
then, it is dropped. So `forecast-made` follows from the log and the scores, and the scores from the question.
"""

from collections import Counter
from typing import NamedTuple

from services.controller import forecast
from services.controller.capacity import Capacity
from services.controller.decider import State
from services.controller.forecast import Question, Scores, Target
from services.controller.saga import Move
from services.controller.seeing import sight
from services.controller.steps import NodeSight, Sight
from shared.contracts.envelope import EventData
from shared.contracts.events import ForecastMade
from shared.model.cost import Coefficients

REALISED_AFTER = 2
"""Windows from the one before a move to the first that the move had all of, as a rule."""


class Asked(NamedTuple):
    """One question, and what its answer will be read against."""

    k: int
    question: Question
    targets: tuple[Target, ...]
    arrivals: int
    stretch_us: int


def ask(state: State, coefficients: Coefficients) -> Asked | None:
    """The question after the last window; None if there is nothing to ask: too few arrivals, for too short a time, or nowhere
    to go."""
    window, parameters = state.windows.last, state.parameters
    told = state.forecast is not None and window is not None and state.forecast.window >= window.k
    if (
        window is None
        or told
        or state.sagas.open
        or parameters.frozen
        or parameters.reconfiguration_policy != "forecast"
    ):
        return None
    arrivals = forecast.stationary(state.arrivals.asked, state.arrivals.closed_ns)
    heard_ns = state.arrivals.closed_ns - state.arrivals.first_ns
    if len(arrivals) < forecast.ARRIVALS_MIN or heard_ns < forecast.HEARD_NS:
        return None
    targets = tuple(forecast.targets(_nodes(state)))
    if len(targets) < 2:
        return None
    question = Question(
        arrivals=forecast.sampled(arrivals),
        pools=tuple(each.degrees for each in targets),
        coefficients=coefficients,
        rule=forecast.rule(parameters),
    )
    stretch_us = (state.arrivals.closed_ns - arrivals[0].time_ns) // 1_000
    return Asked(window.k, question, targets, len(arrivals), stretch_us)


def made(state: State, asked: Asked, scores: Scores) -> list[EventData]:
    """`forecast-made`, unless something has changed since the question."""
    if ask(state, asked.question.coefficients) != asked:
        return []
    return [
        ForecastMade(
            window=asked.k,
            arrivals=asked.arrivals,
            replayed=len(asked.question.arrivals),
            stretch_us=asked.stretch_us,
            pools=tuple(dict(Counter(each.degrees)) for each in asked.targets),
            moves=tuple(each.moves for each in asked.targets),
            scores_ppm=scores.ppm,
            errors_ppm=scores.errors_ppm,
            coefficients=asked.question.coefficients.model_dump(),
            realised_gain=_realised(state),
        )
    ]


def moves(state: State, seen: Sight) -> list[Move]:
    """What the forecast of the last window calls for."""
    told = state.forecast
    if told is None or told.window != seen.window.k or seen.moving:
        return []
    targets = forecast.targets(seen.nodes)
    if tuple(dict(Counter(each.degrees)) for each in targets) != told.pools:
        return []
    arrivals, scores = state.arrivals, Scores(told.scores_ppm, told.errors_ppm)
    choice = forecast.choose(
        seen.nodes, targets, scores, told.stretch_us, seen.parameters, arrivals.changes, arrivals.closed_ns
    )
    if choice is None:
        return []
    reason = f"{choice.gain:.1%} less TTFT in a replay of {told.replayed} arrivals, {choice.target.moves} nodes away"
    return [
        Move(node, composition, forecast.NAME, reason, forecast_gain=choice.gain) for node, composition in choice.moves
    ]


def no_capacity(_: int) -> Capacity:
    """A replay has no use for κ_C."""
    return Capacity(0)


def _nodes(state: State) -> tuple[NodeSight, ...]:
    window = state.windows.last
    assert window is not None, "a window has closed"
    return sight(state, window, no_capacity).nodes


def _realised(state: State) -> float | None:
    window, promised = state.windows.last, state.promised
    if window is None or promised is None or window.k != promised.k + REALISED_AFTER:
        return None
    if not promised.ttft_us or window.mean_ttft_us is None:
        return None
    return 1 - window.mean_ttft_us / promised.ttft_us
