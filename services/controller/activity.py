"""What the workers are busy with, as far as a change of composition disturbs it: running prefills and reused blocks.

The router's loads say more, for a price has to be exact; a step is chosen by drains that differ by 100 ms or more.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
    EpochCommitted,
    NodeDeclaredLost,
    NodeLost,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RequestAssigned,
    RequestRedirected,
    RouterLost,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RequestId, Source, WorkerId, node_of
from shared.model.lost_routers import LostRouters


class Prefill(NamedTuple):
    """One attempt at a worker; `started_ns` is None while it waits."""

    worker: WorkerId
    attempt: int
    service_us: int
    source: Source
    started_ns: int | None = None


@dataclass(slots=True)
class Activity:
    """State of the fold; `evolve` is its only writer. `reused_tokens` counts prompt tokens that each worker had cached; the
    counts are halved with every window, so the last few minutes speak."""

    prefills: dict[RequestId, Prefill] = field(default_factory=dict)
    reused_tokens: dict[WorkerId, int] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)

    def drain_us(self, worker: WorkerId, now_ns: int) -> int:
        """How long what runs there will take to end: the rest of its prediction, or a quarter of the time it has taken if
        that is more. A worker that takes prompts in chunks may be done sooner."""
        running = [each for each in self.prefills.values() if each.worker == worker]
        started = [each.started_ns for each in running if each.started_ns is not None]
        if not started:
            return 0
        service_us = sum(each.service_us for each in running if each.started_ns is not None)
        elapsed_us = max(0, now_ns - min(started)) // 1_000
        return max(service_us - elapsed_us, elapsed_us // 4)


def evolve(activity: Activity, stored: Stored) -> None:
    """Fold one event."""
    match stored.data:
        case RequestAssigned() as data if stored.event.source not in activity.lost_routers:
            activity.prefills[data.request] = Prefill(data.worker, data.attempt, data.service_us, stored.event.source)
        case PrefillStarted() as data:
            found = activity.prefills.get(data.request)
            if found is not None and (found.worker, found.attempt) == (data.worker, data.attempt):
                activity.prefills[data.request] = found._replace(started_ns=stored.event.time_ns)
        case PrefillCompleted() as data:
            _end(activity, data.request, data.attempt)
            reused = activity.reused_tokens.get(data.worker, 0) + data.cached_own_tokens
            if reused:
                activity.reused_tokens[data.worker] = reused
        case PrefillAborted() | RequestRedirected() as data:
            _end(activity, data.request, data.attempt)
        case ended if isinstance(ended, ENDS):
            activity.prefills.pop(ended.request, None)
        case RouterLost() as data:
            activity.lost_routers.add(data.source)
            _forget(activity, [each for each, found in activity.prefills.items() if found.source == data.source])
        case NodeLost() | NodeDeclaredLost() as data:
            _forget(activity, [each for each, found in activity.prefills.items() if node_of(found.worker) == data.node])
            _forget_reuse(activity, data.node)
        case EpochCommitted() as data:
            _forget_reuse(activity, data.node)
        case WindowClosed():
            halved = {worker: tokens // 2 for worker, tokens in activity.reused_tokens.items()}
            activity.reused_tokens = {worker: tokens for worker, tokens in halved.items() if tokens}
        case _:
            pass


def _end(activity: Activity, request: RequestId, attempt: int) -> None:
    found = activity.prefills.get(request)
    if found is not None and found.attempt == attempt:
        del activity.prefills[request]


def _forget(activity: Activity, requests: list[RequestId]) -> None:
    for request in requests:
        del activity.prefills[request]


def _forget_reuse(activity: Activity, node: NodeId) -> None:
    for worker in [each for each in activity.reused_tokens if node_of(each) == node]:
        del activity.reused_tokens[worker]
