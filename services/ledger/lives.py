"""The rules that the lives of requests and epochs obey, whatever dies on the way. Pure; used by the audit."""

from collections import Counter
from collections.abc import Callable

from shared.contracts.envelope import Envelope
from shared.contracts.events import (
    ENDS,
    EpochAborted,
    EpochCommitted,
    PrefillAborted,
    PrefillCompleted,
    ReconfigurationPlanned,
    RequestAssigned,
    RequestReceived,
    RequestRedirected,
    RouterLost,
)
from shared.contracts.ids import NodeId, RequestId
from shared.model.lost_routers import LostRouters

Violated = Callable[[str], None]


class RequestLives:
    """One end per received request, attempts in order, each one over before the next."""

    def __init__(self, violated: Violated) -> None:
        self.received = 0
        self.ends: Counter[str] = Counter()
        self.open: dict[RequestId, str] = {}
        """Open requests and their router's source."""
        self._violated = violated
        self._attempt: dict[RequestId, int] = {}
        self._over: dict[RequestId, int] = {}
        """The last attempt that was assigned, and the last that is over: redirected, prefilled or aborted."""
        self._ended: set[RequestId] = set()
        self._lost = LostRouters()

    def fold(self, event: Envelope, incomplete: bool) -> None:
        """The next event. `incomplete`: events are missing before it, so a request may begin in the middle."""
        if event.source in self._lost:
            self._fold_of_lost(event)
            return
        match event.data:
            case RequestReceived() as data:
                self.received += 1
                if data.request in self.open or data.request in self._ended:
                    self._violated(f"request {data.request}: received twice")
                self.open[data.request] = event.source
            case RequestAssigned() as data:
                self._assign(data, incomplete)
            case RequestRedirected() | PrefillCompleted() | PrefillAborted() as data:
                if data.request in self.open:
                    self._over[data.request] = max(self._over.get(data.request, 0), data.attempt)
            case RouterLost() as data:
                self._lost.add(data.source)
                for request in [each for each, source in self.open.items() if source == data.source]:
                    self._end(request, event.type)
            case ended if isinstance(ended, ENDS):
                if ended.request in self.open:
                    self._end(ended.request, event.type)
                elif ended.request in self._ended:
                    self._violated(f"request {ended.request}: {event.type} although it had ended")
                elif not incomplete:
                    self._violated(f"request {ended.request}: {event.type} although it was never received")
            case _:
                pass

    def _fold_of_lost(self, event: Envelope) -> None:
        """A router that does not know yet that it was declared lost: what it receives has ended, whatever it says."""
        if isinstance(event.data, RequestReceived):
            self.received += 1
            self.ends[RouterLost.TYPE] += 1
            self._ended.add(event.data.request)

    def _assign(self, data: RequestAssigned, incomplete: bool) -> None:
        if data.request not in self.open:
            if data.request in self._ended or not incomplete:
                self._violated(f"request {data.request}: attempt {data.attempt} although it is not open")
            return
        before = self._attempt.get(data.request, 0)
        if data.attempt != before + 1 and not incomplete:
            self._violated(f"request {data.request}: attempt {data.attempt} follows attempt {before}")
        if self._over.get(data.request, 0) < before:
            self._violated(f"request {data.request}: attempt {data.attempt} while attempt {before} was not released")
        self._attempt[data.request] = data.attempt

    def _end(self, request: RequestId, how: str) -> None:
        self.ends[how] += 1
        self._ended.add(request)
        del self.open[request]
        self._attempt.pop(request, None)
        self._over.pop(request, None)


class EpochLives:
    """Committed epochs of a node rise; one reconfiguration of a node at a time, ended once."""

    def __init__(self, violated: Violated) -> None:
        self._violated = violated
        self._committed: dict[NodeId, int] = {}
        self._planned: dict[NodeId, int] = {}

    def begin_log(self) -> None:
        """A new log: what the old one had planned may be lost, and a node may begin again at epoch 1."""
        self._committed.clear()
        self._planned.clear()

    def fold(self, event: Envelope, incomplete: bool) -> None:
        """The next event. `incomplete`: events are missing before it, perhaps the plan of what is aborted."""
        match event.data:
            case ReconfigurationPlanned() as data:
                if data.node in self._planned:
                    self._violated(
                        f"node {data.node}: epoch {data.epoch} planned while {self._planned[data.node]} was under way"
                    )
                self._planned[data.node] = data.epoch
            case EpochCommitted() as data:
                before = self._committed.get(data.node, 0)
                if data.epoch <= before:
                    self._violated(f"node {data.node}: epoch {data.epoch} committed after {before}")
                self._committed[data.node] = data.epoch
                self._planned.pop(data.node, None)
            case EpochAborted() as data:
                if self._planned.pop(data.node, None) != data.epoch and not incomplete:
                    self._violated(f"node {data.node}: epoch {data.epoch} aborted without being planned")
            case _:
                pass
