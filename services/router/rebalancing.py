"""When a worker has nothing to do, one of this router's queued requests is told to go there, if that is worth it."""

from collections.abc import Mapping
from typing import NamedTuple

from services.router import stealing
from services.router.calls import Call
from services.router.frames import Leave
from services.router.wiring import Wiring
from shared.contracts.envelope import Stored
from shared.contracts.events import PrefillAborted, PrefillCompleted, PrefillStarted, RequestAssigned
from shared.contracts.ids import RequestId, WorkerId
from shared.model.pool import Worker

ANSWERS = 2
"""A move takes two: the old worker's and the idle one's."""


class _Move(NamedTuple):
    """A request that was asked to go to an idle worker, which is kept for it until this monotonic time: if an answer was lost,
    the request may wait where it is for long, and the worker is free for others."""

    request: RequestId
    until_ns: int


class Rebalancer:
    """Asks each attempt once, and for one idle worker one at a time. `calls` are the process's open ones."""

    def __init__(self, wiring: Wiring, calls: Mapping[RequestId, Call]) -> None:
        self._wiring = wiring
        self._calls = calls
        self._asked: dict[RequestId, int] = {}
        self._for: dict[WorkerId, _Move] = {}

    def hear(self, stored: Stored) -> None:
        """An event that has been folded."""
        match stored.data:
            case PrefillCompleted() | PrefillAborted() as data:
                if (worker := self._wiring.state.pool.workers.get(data.worker)) is not None:
                    self._look_for(worker)
            case RequestAssigned() | PrefillStarted():
                if stealing.is_crowded(self._wiring.state, self._wiring.source, stored):
                    for worker in stealing.of_each_degree(stealing.idle_workers(self._wiring.state)):
                        self._look_for(worker)
            case _:
                pass

    def look(self) -> None:
        """Every idle worker: it may have become one by another event, or other routers' requests have come since."""
        if stealing.steals(self._wiring.state.parameters):
            for worker in stealing.idle_workers(self._wiring.state):
                self._look_for(worker)

    def _look_for(self, idle: Worker) -> None:
        self._forget()
        if idle.id in self._for:
            return
        moment = self._wiring.moment()
        move = stealing.best_move(self._wiring.state, self._wiring.source, idle, moment.now_ns, self._asked)
        if move is not None and (call := self._calls.get(move.request)) is not None:
            answered_s = ANSWERS * self._wiring.settings.ack_timeout_s
            until_ns = self._wiring.clock.monotonic_ns() + round(answered_s * 1e9)
            self._asked[move.request], self._for[idle.id] = move.attempt, _Move(move.request, until_ns)
            call.inbox.put(Leave(move.attempt))

    def _forget(self) -> None:
        """Whoever has gone on since, or has started, or ended."""
        for request, attempt in list(self._asked.items()):
            opened = self._wiring.state.loads.open.get(request)
            waits = opened is not None and opened.assignment is not None and not opened.assignment.started
            if not waits or opened is None or opened.attempt != attempt:
                del self._asked[request]
        now_ns = self._wiring.clock.monotonic_ns()
        self._for = {
            worker: move for worker, move in self._for.items() if move.request in self._asked and now_ns < move.until_ns
        }
