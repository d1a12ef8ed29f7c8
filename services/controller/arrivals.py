"""Recent arrivals as of each window's end: what a forecast replays.

Whoever folds the log up to a `window-closed` has the same ones, however long the answer to a forecast takes.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Self

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


class Change(NamedTuple):
    """From which workers to which a node went, in whatever order they stand: equal nodes can stand in for each other."""

    before: Composition
    after: Composition

    @classmethod
    def of(cls, before: Composition, after: Composition) -> Self:
        return cls(tuple(sorted(before)), tuple(sorted(after)))


@dataclass(slots=True)
class Arrivals:
    """State of the fold; `evolve` is its only writer. `asked` holds the arrivals as of the last window, `closed_ns` its end,
    `first_ns` when the first came of all, `changes` when a node last changed in each way, `serving` what each node has."""

    recent: deque[Arrival] = field(default_factory=lambda: deque(maxlen=ARRIVALS_MAX))
    asked: tuple[Arrival, ...] = ()
    closed_ns: int = 0
    first_ns: int = 0
    changes: dict[Change, int] = field(default_factory=dict)
    serving: dict[NodeId, Composition] = field(default_factory=dict)


def evolve(arrivals: Arrivals, stored: Stored) -> None:
    """Fold one event."""
    match stored.data:
        case RequestAssigned(attempt=1) as data:
            arrivals.recent.append(
                Arrival(stored.event.time_ns, data.request, data.uncached_tokens, data.cached_tokens)
            )
            arrivals.first_ns = arrivals.first_ns or stored.event.time_ns
        case EpochCommitted() as data:
            before = arrivals.serving.get(data.node)
            if before is not None and (change := Change.of(before, data.composition)).before != change.after:
                arrivals.changes[change] = stored.event.time_ns
            arrivals.serving[data.node] = data.composition
        case WindowClosed():
            arrivals.closed_ns = stored.event.time_ns
            oldest_ns = arrivals.closed_ns - HISTORY_NS
            while arrivals.recent and arrivals.recent[0].time_ns < oldest_ns:
                arrivals.recent.popleft()
            arrivals.asked = tuple(arrivals.recent)
        case _:
            pass
