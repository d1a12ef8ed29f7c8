"""Every unit handles every control message once, in one order, through any switches and at any pace of its socket."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sglang.plugin.mailbox import Mailbox
from services.worker.engine.sglang.plugin.places import place
from shared.model.lattice import Composition
from tests.support.compositions import compositions

UNITS = 4


@dataclass
class SimulatedUnit:
    """A unit as its scheduler loops: pull, tell the group, handle. A message is a number, a commit a composition."""

    socket: deque[object] = field(default_factory=deque)
    mailbox: Mailbox = field(default_factory=Mailbox)
    handled: list[object] = field(default_factory=list)


class SimulatedServer:
    def __init__(self) -> None:
        self.units = [SimulatedUnit() for _ in range(UNITS)]
        self.composition: Composition = (1,) * UNITS
        self._commits = 0

    def send(self, message: object, until: int) -> list[SimulatedUnit]:
        """Into the sockets of units before `until`; the rest still to be delivered is returned."""
        for unit in self.units[:until]:
            unit.socket.append(message)
        return self.units[until:]

    def loop(self, leader: int) -> None:
        """One turn of the group whose leader this is, if it is one."""
        here = place(self.composition, leader)
        if not here.leads:
            return
        for member in here.group.ranks:
            self._drop(self.units[member], leads=member == leader)
        head = self.units[leader]
        if head.mailbox.behind:
            return
        pulled = []
        while head.socket and not head.mailbox.must_stop:
            pulled.append(head.socket.popleft())
            if isinstance(pulled[-1], tuple):
                head.mailbox.took_commit()
        for message in pulled:
            for member in here.group.ranks:
                unit = self.units[member]
                unit.handled.append(message)
                if isinstance(message, tuple):
                    unit.mailbox.handled_commit()

    def _drop(self, unit: SimulatedUnit, leads: bool) -> None:
        while unit.socket and unit.mailbox.may_drop(leads):
            if isinstance(unit.socket.popleft(), tuple):
                unit.mailbox.took_commit()


@given(
    st.lists(st.one_of(st.integers(0, 99), compositions(UNITS, True)), max_size=12),
    st.lists(st.integers(0, UNITS - 1), max_size=200),
    st.data(),
)
def test_once_each_and_in_order(messages: list[object], turns: list[int], data: st.DataObject) -> None:
    """All groups take the same decision, so here a commit changes the server's composition when every unit has handled it;
    until then its groups loop on, as those do that wait for votes."""
    server, order = SimulatedServer(), iter(turns)
    sent: list[object] = []
    for index, message in enumerate(messages):
        # Unique, so that order shows; a commit stays a tuple.
        marked = (index, message) if isinstance(message, tuple) else index
        late = server.send(marked, data.draw(st.integers(0, UNITS)))
        for unit, _ in zip(order, range(3), strict=False):
            server.loop(unit)
        for unit_of in late:
            unit_of.socket.append(marked)
        sent.append(marked)
        if isinstance(message, tuple):
            for _ in range(4):
                for unit in range(UNITS):
                    server.loop(unit)
            assert all(unit_of.handled[-1:] == [marked] for unit_of in server.units), "the commit has reached everybody"
            server.composition = message
    for _ in range(4):
        for unit in range(UNITS):
            server.loop(unit)
    for unit_of in server.units:
        assert unit_of.handled == sent
