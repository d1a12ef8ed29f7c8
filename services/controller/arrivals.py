"""Recent arrivals as of each window's end: what a forecast replays.

Whoever folds the log up to a `window-closed` has the same ones, however long the answer to a forecast takes.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.envelope import Stored
from shared.contracts.events import EpochCommitted, RequestAssigned, WindowClosed
from shared.contracts.ids import NodeId, RequestId
from shared.model.lattice import Composition

HISTORY_NS = 120 * 10**9
"""How far back a forecast looks at most."""

ARRIVALS_MAX = 20_000
"""166 requests a second for two minutes; of more, the older are forgotten."""


class Arrival(NamedTuple):
    """One first attempt: when its router decided, and R and P as it predicted them."""

    time_ns: int
    request: RequestId
    uncached_tokens: int
    cached_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens


class Left(NamedTuple):
    """A composition that a node had, and when it ended."""

    composition: Composition
    time_ns: int


@dataclass(slots=True)
class Arrivals:
    """State of the fold; `evolve` is its only writer. `asked` holds the arrivals as of the last window, `closed_ns` its end,
    `left` the composition before each node's last change, `serving` the one it has."""

    recent: deque[Arrival] = field(default_factory=lambda: deque(maxlen=ARRIVALS_MAX))
    asked: tuple[Arrival, ...] = ()
    closed_ns: int = 0
    left: dict[NodeId, Left] = field(default_factory=dict)
    serving: dict[NodeId, Composition] = field(default_factory=dict)


def evolve(arrivals: Arrivals, stored: Stored) -> None:
    """Fold one event."""
    match stored.data:
        case RequestAssigned(attempt=1) as data:
            arrivals.recent.append(
                Arrival(stored.event.time_ns, data.request, data.uncached_tokens, data.cached_tokens)
            )
        case EpochCommitted() as data:
            before = arrivals.serving.get(data.node)
            if before is not None and before != data.composition:
                arrivals.left[data.node] = Left(before, stored.event.time_ns)
            arrivals.serving[data.node] = data.composition
        case WindowClosed():
            arrivals.closed_ns = stored.event.time_ns
            oldest_ns = arrivals.closed_ns - HISTORY_NS
            while arrivals.recent and arrivals.recent[0].time_ns < oldest_ns:
                arrivals.recent.popleft()
            arrivals.asked = tuple(arrivals.recent)
        case _:
            pass
