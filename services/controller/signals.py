"""What a window says about the composition, and for how long it has said so (paper, section 4.3).

    overload     D > up · capacity
    underload    D < down · capacity
    more-long    the share of long prompts is `long_delta` or more above what it was at the last commit
    fewer-long   … below

A window without requests, or in which nobody could serve, passes no threshold. A commit starts every count anew: what was
sustained before it was sustained under another composition. All of it is recorded in `window-closed`, so the last window and
the commits since are enough to go on from.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from shared.contracts.events import WindowClosed
from shared.model.cost import US_PER_S
from shared.model.parameters import PERSISTENCE_MAX, Parameters

Signal = Literal["overload", "underload", "more-long", "fewer-long"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)

STABLE_CHANGE = 0.15
"""Demand that changes by less is stable, and only then does a change of the mix count (paper, section 4.3)."""


class Shares(NamedTuple):
    """Of long prompts: among requests, and among their tokens."""

    of_requests: float
    of_tokens: float

    def watched(self, parameters: Parameters) -> float:
        return self.of_requests if parameters.long_share_by == "requests" else self.of_tokens


class Trend(NamedTuple):
    """What earlier windows leave to the next one. `demand` holds D per second of the last ones, in microseconds."""

    persistence: Mapping[str, int] = {}
    demand: tuple[int, ...] = ()
    reference: Shares | None = None


def marked(window: WindowClosed, trend: Trend, parameters: Parameters) -> WindowClosed:
    """`window` with its signals, after the windows that `trend` knows."""
    passed = _passed(window, trend.reference, parameters)
    rate = window.demand_us * US_PER_S // window.length_us
    return window.model_copy(
        update={
            "signals": passed,
            "persistence": {signal: trend.persistence.get(signal, 0) + 1 for signal in passed},
            "recent_demand": (*trend.demand, rate)[-PERSISTENCE_MAX:],
            "long_reference": trend.reference or (_shares(window) if window.requests else None),
        }
    )


def after_window(window: WindowClosed) -> Trend:
    """What the next window needs of this one."""
    reference = Shares(*window.long_reference) if window.long_reference else None
    return Trend(window.persistence, window.recent_demand, reference)


def after_commit(trend: Trend, window: WindowClosed | None) -> Trend:
    """`window` was the last before the commit: its shares are what later ones are compared with."""
    reference = _shares(window) if window is not None and window.requests else trend.reference
    return Trend(demand=trend.demand, reference=reference)


def is_sustained(signal: Signal, window: WindowClosed, parameters: Parameters) -> bool:
    """Whether this signal held in the last m windows, this one included."""
    return window.persistence.get(signal, 0) >= parameters.persistence


def is_stable(window: WindowClosed, parameters: Parameters) -> bool:
    """Whether demand has changed little over the last m windows."""
    recent = window.recent_demand[-parameters.persistence :]
    return len(recent) == parameters.persistence and max(recent) - min(recent) < STABLE_CHANGE * max(recent)


def peak_demand_us(window: WindowClosed, parameters: Parameters) -> int:
    """The highest D of the last m windows, for a window of this one's length."""
    recent = window.recent_demand[-parameters.persistence :]
    return max(recent, default=0) * window.length_us // US_PER_S


def _shares(window: WindowClosed) -> Shares:
    return Shares(window.long_request_share, window.long_token_share)


def _passed(window: WindowClosed, reference: Shares | None, parameters: Parameters) -> tuple[Signal, ...]:
    if not window.requests or not window.capacity_us:
        return ()
    change = 0.0 if reference is None else _shares(window).watched(parameters) - reference.watched(parameters)
    held = {
        "overload": window.demand_us > parameters.up * window.capacity_us,
        "underload": window.demand_us < parameters.down * window.capacity_us,
        "more-long": change >= parameters.long_delta,
        "fewer-long": -change >= parameters.long_delta,
    }
    return tuple(signal for signal in SIGNALS if held[signal])
