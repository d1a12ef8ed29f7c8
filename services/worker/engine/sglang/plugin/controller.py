"""The plug-in in SGLang's data-parallel controller: holds work, sends it to leaders, and writes into verbs what is in
force.

`workers[i]` of the controller is the socket of unit i, and all its ways to choose a unit end there. So what stands in
that list decides where work goes, while control messages must still reach every unit: each answers for itself.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, sock_recv, sock_send
from sglang.srt.runtime_context import get_parallel

from services.worker.engine.sglang.plugin import wire
from services.worker.engine.sglang.plugin.ballot import Ballot, Decision, Store
from services.worker.engine.sglang.plugin.desk import Desk
from services.worker.engine.sglang.plugin.waiting import Waiting
from services.worker.engine.sglang.plugin.wire import Commit, InForce, Prepare, Release

LOOK_MS = 50
"""How often a lease is looked at when no message comes."""

logger = logging.getLogger(__name__)


class ControllerHooks:
    """Made in every process of a server; does something in the controller's."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Store | None = None
        self._desk: Desk | None = None
        self._sockets: list[Any] = []
        self._waiting = Waiting()
        self._held: set[int] = set()
        self._ranks_per_unit = 1

    def event_loop(self, _original: Callable[..., None], controller: Any) -> None:
        """As the original, which asks its socket without a pause; this one waits for a message, and looks at the lease."""
        self._begin(controller)
        while True:
            controller.soft_watchdog.feed()
            if controller.recv_from_tokenizer.poll(LOOK_MS):
                controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))
            self._look(controller)

    def control(self, original: Callable[..., None], controller: Any, message: Any) -> None:
        """Pass a control message to every unit. Around both methods that do so."""
        verb = self._read(message)
        if isinstance(message, AbortReq):
            for unit in self._held:  # again behind the work that it may be about
                sock_send(self._waiting.keeper(unit), message)
        ending = isinstance(verb, Release) and self._at().ends(verb)
        if ending:
            self._end()
        if verb is not None:
            message.server_args = wire.tell(message.server_args, self._told(verb))
        routed, controller.workers = controller.workers, self._sockets
        try:
            original(controller, message)
        finally:
            controller.workers = routed
        self._route(controller)

    def _begin(self, controller: Any) -> None:
        self._sockets = list(controller.workers)
        self._desk = Desk(len(self._sockets))
        self._ranks_per_unit = get_parallel().attn_tp_size
        self._store = self._connect()

    def _read(self, message: Any) -> wire.Verb | None:
        numbers = getattr(message, "server_args", None)
        if not isinstance(numbers, dict):
            return None
        try:
            return wire.decode(numbers, len(self._sockets))
        except ValueError as error:
            logger.warning("vertumnus: refused a verb: %s", error)
            return None  # units refuse it too, as nothing in force is written into it

    def _told(self, verb: wire.Verb) -> InForce:
        desk = self._at()
        match verb:
            case Prepare():
                return desk.prepare(verb, time.monotonic())
            case Commit():
                return desk.commit(verb, time.monotonic())
            case _:
                return InForce(desk.composition)

    def _look(self, controller: Any) -> None:
        if self._waiting.full or self._at().expired(time.monotonic()):
            pending = self._at().pending
            assert pending is not None, "nothing is held without an epoch under way"
            logger.warning("vertumnus: the lease of epoch %d has ended", pending.epoch)
            self._end()
            self._route(controller)

    def _end(self) -> None:
        """The pending epoch is over: as units decided, or, where they have not, by abort."""
        desk = self._at()
        pending = desk.pending
        assert pending is not None, "an epoch is under way"
        decision = Decision.ABORT
        if pending.committing:
            assert self._store is not None, "connected before the first message"
            per_unit = self._ranks_per_unit
            voters = [unit * per_unit + rank for unit in desk.voters() for rank in range(per_unit)]
            ballot = Ballot(self._store, pending.epoch, voters)
            decision = ballot.decide(Decision.ABORT)
            ballot.done()
        desk.end(decision)
        logger.info("vertumnus: epoch %s: %s, in force %s", pending.epoch, decision, desk.composition)

    def _route(self, controller: Any) -> None:
        """Let the controller's list say where work goes now, and send what is held no longer."""
        desk = self._at()
        flowing = {}
        for unit, socket in enumerate(self._sockets):
            assert socket is not None, "one server, all of whose units are on this node"
            leader = self._sockets[desk.leader(unit)]
            if desk.holds(unit):
                controller.workers[unit] = self._waiting.keeper(unit)
                self._held.add(unit)
            else:
                controller.workers[unit] = leader
                if unit in self._held:
                    flowing[unit] = leader
        self._held -= flowing.keys()
        self._waiting.flush(flowing)

    def _at(self) -> Desk:
        assert self._desk is not None, "no message comes before the loop begins"
        return self._desk


def install(register: Callable[..., None], around: Any, connect: Callable[[], Store]) -> None:
    """Put the hooks in."""
    hooks = ControllerHooks(connect)
    target = "sglang.srt.managers.data_parallel_controller.DataParallelController."
    register(target + "event_loop", hooks.event_loop, around)
    register(target + "send_control_message", hooks.control, around)
    register(target + "send_to_all_workers", hooks.control, around)
