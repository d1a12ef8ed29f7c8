"""What waits or runs at each worker: the prefills that are under way, with their predicted seconds and prompt tokens.

The router's own loads say more, for a price has to be exact. This is for decisions that only weigh workers against each other.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
    NodeDeclaredLost,
    NodeLost,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RequestAssigned,
    RequestRedirected,
    RouterLost,
)
from shared.contracts.ids import RequestId, Source, WorkerId, node_of
from shared.model.lost_routers import LostRouters


class Prefill(NamedTuple):
    """One attempt at a worker; `started_ns` is None while it waits."""

    worker: WorkerId
    attempt: int
    service_us: int
    prompt_tokens: int
    source: Source
    started_ns: int | None = None


class Waiting(NamedTuple):
    """Of one worker, together."""

    service_us: int = 0
    prompt_tokens: int = 0


NOTHING = Waiting()

HEARD = frozenset(
    {
        RequestAssigned, PrefillStarted, PrefillCompleted, PrefillAborted, RequestRedirected, *ENDS, RouterLost, NodeLost,
        NodeDeclaredLost,
    }
)  # fmt: skip
"""By any other event nobody has more or less to do."""


@dataclass(slots=True)
class Backlog:
    """State of the fold; `evolve` is its only writer. A worker with nothing has no entry."""

    prefills: dict[RequestId, Prefill] = field(default_factory=dict)
    of_worker: dict[WorkerId, Waiting] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)

    def at(self, worker: WorkerId) -> Waiting:
        return self.of_worker.get(worker, NOTHING)

    def check(self) -> None:
        """The sums are those of the prefills."""
        sums: dict[WorkerId, Waiting] = {}
        for each in self.prefills.values():
            service_us, prompt_tokens = sums.get(each.worker, NOTHING)
            sums[each.worker] = Waiting(service_us + each.service_us, prompt_tokens + each.prompt_tokens)
        assert sums == self.of_worker, f"{self.of_worker} are counted, {sums} wait"


def evolve(backlog: Backlog, stored: Stored) -> None:
    """Fold one event."""
    if type(stored.data) not in HEARD:
        return
    match stored.data:
        case RequestAssigned() as data if stored.event.source not in backlog.lost_routers:
            _end(backlog, data.request)
            prompt_tokens = data.uncached_tokens + data.cached_tokens
            prefill = Prefill(data.worker, data.attempt, data.service_us, prompt_tokens, stored.event.source)
            backlog.prefills[data.request] = prefill
            _add(backlog, prefill, 1)
        case PrefillStarted() as data:
            found = backlog.prefills.get(data.request)
            if found is not None and (found.worker, found.attempt) == (data.worker, data.attempt):
                backlog.prefills[data.request] = found._replace(started_ns=stored.event.time_ns)
        case PrefillCompleted() | PrefillAborted() | RequestRedirected() as data:
            found = backlog.prefills.get(data.request)
            if found is not None and found.attempt == data.attempt:
                _end(backlog, data.request)
        case ended if isinstance(ended, ENDS):
            _end(backlog, ended.request)
        case RouterLost() as data:
            backlog.lost_routers.add(data.source)
            for request in [each for each, found in backlog.prefills.items() if found.source == data.source]:
                _end(backlog, request)
        case NodeLost() | NodeDeclaredLost() as data:
            for request in [each for each, found in backlog.prefills.items() if node_of(found.worker) == data.node]:
                _end(backlog, request)
        case _:
            pass


def _end(backlog: Backlog, request: RequestId) -> None:
    if (found := backlog.prefills.pop(request, None)) is not None:
        _add(backlog, found, -1)


def _add(backlog: Backlog, prefill: Prefill, sign: int) -> None:
    service_us, prompt_tokens = backlog.at(prefill.worker)
    sums = Waiting(service_us + sign * prefill.service_us, prompt_tokens + sign * prefill.prompt_tokens)
    if sums == NOTHING:
        backlog.of_worker.pop(prefill.worker, None)
    else:
        backlog.of_worker[prefill.worker] = sums
