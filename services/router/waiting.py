"""The calls of this process that wait for their tenant's turn."""

import asyncio
from collections.abc import Sequence

import structlog

from services.router import decider, turns
from services.router.calls import Call
from services.router.turns import Turn
from services.router.wiring import Placed, Wiring, rejection
from shared.contracts.events import RequestAssigned, RequestCancelled
from shared.contracts.ids import RequestId
from shared.runtime.appending import Origin
from shared.runtime.outbox import OutboxFull


class WaitingRoom:
    """Who waits, and why, is in the folded state; here is whom to tell."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._turns: dict[RequestId, tuple[Call, asyncio.Future[Placed]]] = {}
        self._logger = structlog.get_logger(component="waiting")

    def __len__(self) -> int:
        return sum(not turn.done() for _, turn in self._turns.values())

    def enter(self, call: Call) -> "asyncio.Future[Placed]":
        """Its first assignment, when its turn has come; Rejected if it waits too long. Ends with `leave`."""
        turn: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._turns[call.request] = call, turn
        return turn

    def leave(self, request: RequestId) -> None:
        """The request has ended. Harmless for one that never waited."""
        self._turns.pop(request, None)

    def look(self) -> None:
        """Let go whoever may go, one after the other: each that goes takes of its tenant's share."""
        wiring = self._wiring
        while self._turns and self._settle(turns.next_turn(wiring.state, wiring.source, wiring.moment())):
            pass

    def expire(self) -> None:
        """Reject whoever has waited too long."""
        if self._turns:
            self._settle(turns.overdue(self._wiring.state, self._wiring.source, self._wiring.moment()))

    def _settle(self, decided: Sequence[Turn]) -> bool:
        """Record and tell; whether there was anything, and room for it. What the log does not take now is decided anew."""
        for each in decided:
            try:
                if (found := self._turns.get(each.request)) is None:
                    self._end(each.request)
                    continue
                call, turn = found
                [event] = self._wiring.record(call, [each])
            except OutboxFull as full:
                self._logger.warning("a turn waits for the log", error=str(full))
                return False
            if turn.done():
                continue  # its client has just left, which ends it at once
            if isinstance(each, RequestAssigned):
                turn.set_result(Placed(each, event))
            else:
                self._wiring.metrics.ended.labels("rejected").inc()
                turn.set_exception(rejection(each))
        return bool(decided)

    def _end(self, request: RequestId) -> None:
        """Of one whose client left when the log had no room for that. Errors: OutboxFull."""
        ended = decider.end(self._wiring.state, RequestCancelled(request=request))
        self._wiring.outbox.record(ended, Origin(request))
