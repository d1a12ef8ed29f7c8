"""Every unit handles every control message once, in one order, through any switches and at any pace of its socket."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.sglang.plugin.mailbox import Mailbox
from services.worker.engine.sglang.plugin.places import place, touched
from shared.model.lattice import Composition, Group
from tests.support.compositions import compositions

UNITS = 4


@dataclass(frozen=True)
class Message:
    """A commit if `is_commit`; one that switches if it also says to what."""

    number: int
    is_commit: bool = False
    to: Composition | None = None


@dataclass
class SimulatedUnit:
    group: Group
    sent: deque[Message] = field(default_factory=deque)
    """On their way to the socket."""

    socket: deque[Message] = field(default_factory=deque)
    mailbox: Mailbox = field(default_factory=Mailbox)
    handled: list[int] = field(default_factory=list)
    votes: Message | None = None


class SimulatedServer:
    """Schedulers that loop: pull, tell the group, handle. A touched unit waits in a commit for the others that it touches."""

    def __init__(self) -> None:
        self.composition: Composition = (1,) * UNITS
        self.units = [SimulatedUnit(place(self.composition, unit).group) for unit in range(UNITS)]

    def send(self, message: Message) -> None:
        for unit in self.units:
            unit.sent.append(message)

    def deliver(self, unit: int) -> None:
        if self.units[unit].sent:
            self.units[unit].socket.append(self.units[unit].sent.popleft())

    def loop(self, index: int) -> None:
        """One turn of the group that this unit leads."""
        head = self.units[index]
        if head.group.first_rank != index or head.votes is not None:
            return
        members = [self.units[member] for member in head.group.ranks]
        for unit in members:
            self._drop(unit, leads=unit is head)
        if head.mailbox.behind:
            return
        pulled = []
        while head.socket and not head.mailbox.must_stop:
            pulled.append(head.socket.popleft())
            if pulled[-1].is_commit:
                head.mailbox.took_commit()
        for message in pulled:
            for unit in members:
                unit.handled.append(message.number)
                if message.to is not None and index in touched(self.composition, message.to):
                    unit.votes = message
                elif message.is_commit:
                    unit.mailbox.handled_commit()
            self._decide(message)

    def _decide(self, message: Message) -> None:
        if message.to is None:
            return
        voters = touched(self.composition, message.to)
        if voters and all(self.units[unit].votes is message for unit in voters):
            for unit in voters:
                self.units[unit].votes = None
                self.units[unit].group = place(message.to, unit).group
                self.units[unit].mailbox.handled_commit()
            self.composition = message.to

    def _drop(self, unit: SimulatedUnit, leads: bool) -> None:
        while unit.socket and unit.mailbox.may_drop(leads):
            if unit.socket.popleft().is_commit:
                unit.mailbox.took_commit()

    def rest(self) -> None:
        """Everything arrives and is handled."""
        while True:
            before = [(len(unit.sent), len(unit.socket), len(unit.handled)) for unit in self.units]
            for unit in range(UNITS):
                while self.units[unit].sent:
                    self.deliver(unit)
                self.loop(unit)
            if before == [(len(unit.sent), len(unit.socket), len(unit.handled)) for unit in self.units]:
                return


PLAIN, REFUSED = st.just("plain"), st.just("refused")
TURNS = st.lists(st.tuples(st.booleans(), st.integers(0, UNITS - 1)), max_size=24)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.one_of(PLAIN, REFUSED, compositions(UNITS, True)), TURNS), max_size=12))
def test_once_each_and_in_order(story: list[tuple[str | Composition, list[tuple[bool, int]]]]) -> None:
    """The controller begins no switch before the last one has ended; whatever else it sends may lie right behind a commit."""
    server = SimulatedServer()
    for number, (what, turns) in enumerate(story):
        if isinstance(what, tuple):
            server.rest()
        server.send(Message(number, what != "plain", what if isinstance(what, tuple) else None))
        for delivers, unit in turns:
            server.deliver(unit) if delivers else server.loop(unit)
    server.rest()
    for unit in server.units:
        assert unit.handled == list(range(len(story)))
        assert not unit.mailbox.behind
