"""Observation windows: what the pool was asked for, and what it could carry (paper, sections 3.1 and 4.3).

Window k holds the events with sequence in (close of k-1, close of k]. The leader says in `window-closed` how far it had
folded when its clock passed the end; everything else in that event follows from the log alone: fold up to there, and
`close` says it again. The first window begins with the first leader.

    D           Σ predicted service of first attempts
    long share  prompts over `long_tokens`, by first attempts and by their tokens
    attainment  Σ L over completions within their SLO / Σ L over completions that have one
    hit rate    prompt tokens that needed no computing / prompt tokens, over finished prefills
    capacity    Σ κ_C of schedulable workers at the close
    signals     thresholds that it passed, and for how many windows in a row (`signals.py`)
"""

from collections import deque
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from services.controller import signals
from services.controller.signals import Trend
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
    EpochCommitted,
    LeadershipTaken,
    ParametersChanged,
    PrefillCompleted,
    RequestAssigned,
    RequestCompleted,
    RequestReceived,
    RouterLost,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RequestId, Source
from shared.model.cost import US_PER_S
from shared.model.lost_routers import LostRouters
from shared.model.parameters import Parameters
from shared.model.pool import Pool, Worker

UNCLOSED_MAX = 100_000
"""Counts kept apart because a close may fall before them: only what is stored while one append is under way."""


class Tally(NamedTuple):
    """What is added up over a window."""

    requests: int = 0
    prompt_tokens: int = 0
    demand_us: int = 0
    long_requests: int = 0
    long_prompt_tokens: int = 0
    completed: int = 0
    ttft_us: int = 0
    slo_tokens: int = 0
    met_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0

    def plus(self, other: "Tally") -> "Tally":
        return Tally(*map(add, self, other))


NOTHING = Tally()

HEARD = frozenset(
    {
        RequestReceived, RequestAssigned, PrefillCompleted, *ENDS, RouterLost, EpochCommitted, ParametersChanged,
        LeadershipTaken, WindowClosed,
    }
)  # fmt: skip
"""What windows count, and what begins or ends them."""


class Asked(NamedTuple):
    """What an open request's completion will be measured by."""

    prompt_tokens: int
    slo_us: int
    source: Source


@dataclass(slots=True)
class Windows:
    """State of the fold; `evolve` is its only writer. `started_ns` is None before the first leader.

    `counted` holds (sequence, count) after the last close; `older` adds up those beyond `UNCLOSED_MAX`.
    `profiled_us` is the window length that the κ_C of a node's workers were committed for, `last` the newest record.
    """

    k: int = 0
    from_seq: int = 0
    started_ns: int | None = None
    older: Tally = NOTHING
    counted: deque[tuple[int, Tally]] = field(default_factory=deque)
    open: dict[RequestId, Asked] = field(default_factory=dict)
    profiled_us: dict[NodeId, int] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)
    trend: Trend = field(default_factory=Trend)
    last: WindowClosed | None = None


def evolve(windows: Windows, stored: Stored, parameters: Parameters) -> None:
    """Fold one event; `parameters` are those in force at it."""
    if type(stored.data) not in HEARD:
        return
    match stored.data:
        case RequestReceived() as data if stored.event.source not in windows.lost_routers:
            windows.open[data.request] = Asked(data.prompt_tokens, data.slo_us, stored.event.source)
        case RequestAssigned(attempt=1) as data:
            _count(windows, stored.stream_seq, _first_attempt(data, parameters.long_tokens))
        case PrefillCompleted() as data:
            reused = data.cached_own_tokens + data.cached_in_flight_tokens + data.cached_fetched_tokens
            tally = Tally(prefilled_tokens=data.computed_tokens + reused, reused_tokens=reused)
            _count(windows, stored.stream_seq, tally)
        case RequestCompleted() as data:
            _count(windows, stored.stream_seq, _completion(data, windows.open.pop(data.request, None)))
        case ended if isinstance(ended, ENDS):
            windows.open.pop(ended.request, None)
        case RouterLost() as data:
            windows.lost_routers.add(data.source)
            for request in [each for each, asked in windows.open.items() if asked.source == data.source]:
                del windows.open[request]
        case EpochCommitted() as data:
            windows.profiled_us[data.node] = parameters.window_s * US_PER_S
            windows.trend = signals.after_commit(windows.trend, windows.last)
        case ParametersChanged() as data if "long_tokens" in data.changes:
            windows.trend = windows.trend._replace(reference=None)
        case LeadershipTaken() if windows.started_ns is None:
            _begin(windows, stored.stream_seq, stored.event.time_ns)
        case WindowClosed() as data:
            windows.k, windows.last = data.k, data
            windows.trend = signals.after_window(data)
            _begin(windows, data.to_seq, stored.event.time_ns)
        case _:
            pass


def close(windows: Windows, pool: Pool, parameters: Parameters, to_seq: int, length_us: int) -> WindowClosed:
    """The window that ends at `to_seq`, to which `windows` and `pool` are folded; it lasted `length_us`."""
    total = windows.older
    for _, tally in windows.counted:
        total = total.plus(tally)
    window = WindowClosed(
        k=windows.k + 1,
        from_seq=windows.from_seq,
        to_seq=to_seq,
        length_us=length_us,
        requests=total.requests,
        completed=total.completed,
        prompt_tokens=total.prompt_tokens,
        demand_us=total.demand_us,
        long_tokens=parameters.long_tokens,
        long_request_share=total.long_requests / total.requests if total.requests else 0.0,
        long_token_share=total.long_prompt_tokens / total.prompt_tokens if total.prompt_tokens else 0.0,
        capacity_us=_capacity_us(windows, pool, length_us),
        attainment=total.met_tokens / total.slo_tokens if total.slo_tokens else None,
        hit_rate=total.reused_tokens / total.prefilled_tokens if total.prefilled_tokens else None,
        mean_ttft_us=total.ttft_us // total.completed if total.completed else None,
    )
    return signals.marked(window, windows.trend, parameters)


def _begin(windows: Windows, from_seq: int, now_ns: int) -> None:
    windows.from_seq, windows.started_ns, windows.older = from_seq, now_ns, NOTHING
    while windows.counted and windows.counted[0][0] <= from_seq:
        windows.counted.popleft()


def _count(windows: Windows, seq: int, tally: Tally) -> None:
    windows.counted.append((seq, tally))
    if len(windows.counted) > UNCLOSED_MAX:
        windows.older = windows.older.plus(windows.counted.popleft()[1])


def _first_attempt(data: RequestAssigned, long_tokens: int) -> Tally:
    prompt_tokens = data.uncached_tokens + data.cached_tokens
    is_long = prompt_tokens > long_tokens
    return Tally(
        requests=1,
        prompt_tokens=prompt_tokens,
        demand_us=data.service_us,
        long_requests=int(is_long),
        long_prompt_tokens=prompt_tokens if is_long else 0,
    )


def _completion(data: RequestCompleted, asked: Asked | None) -> Tally:
    """A request whose `request-received` the log no longer has counts as completed and says nothing about SLOs."""
    if asked is None or not asked.slo_us:
        return Tally(completed=1, ttft_us=data.ttft_us)
    met = asked.prompt_tokens if data.ttft_us <= asked.slo_us else 0
    return Tally(completed=1, ttft_us=data.ttft_us, slo_tokens=asked.prompt_tokens, met_tokens=met)


def capacity_us(windows: Windows, worker: Worker, length_us: int) -> int:
    """κ_C for a window of this length: one that bridges a change of leaders is longer than those it was given for."""
    return worker.capacity_us * length_us // windows.profiled_us[worker.node]


def _capacity_us(windows: Windows, pool: Pool, length_us: int) -> int:
    return sum(capacity_us(windows, worker, length_us) for worker in pool.workers.values() if pool.schedulable(worker))
