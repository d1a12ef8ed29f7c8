"""One reconfiguration with one fault, in virtual time: the real shell of a leader and its standby over the log in memory, and
a node that takes its time, dies, comes back and refuses as agents do.

After a while everything must be as if nobody had looked: the plan has one end, the node serves its old or its new composition
with every worker schedulable, both controllers fold the same, and `verify` derives every decision again.
"""

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from controller_pool import N0, Cell, Member, Pool

from services.controller import decider
from services.controller.decider import Asker
from shared.contracts.commands import Accepted, Adopt, Drain, Refused, Reply, decode_command, encode_message
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    NodeLost,
    PlacementReconciled,
    RankAdoptedEpoch,
    ReconfigurationPlanned,
)
from shared.model.lattice import Composition
from shared.runtime.memory import MemoryLog
from shared.runtime.ports import Unavailable
from tests.support.story import adopted, registered

OLD: Composition = (4, 4)
NEW: Composition = (2, 2, 4)
SAGA = (ReconfigurationPlanned, DrainStarted, DrainCompleted, RankAdoptedEpoch, PlacementReconciled, EpochCommitted)


class Log(MemoryLog):
    """One that may be `away`."""

    away = False

    async def append(self, entries, expected):
        if self.away:
            raise Unavailable("the server is away")
        return await super().append(entries, expected)

    async def last_on(self, subject: str):
        if self.away:
            raise Unavailable("the server is away")
        return await super().last_on(subject)


class Node(Pool):
    """The pool, with a node that is slow by chance. `on` is called with each event of the saga as it is stored."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.log, self.cell = Log(), Cell()
        self.chance = chance
        self.on: Callable[[EventData], None] = lambda data: None
        self.refuses: dict[type, Reply] = {}
        self.deaf: set[type] = set()
        self.served = 0
        self.restarting: asyncio.Task[None] | None = None

    def _witness(self, _: None, stored: Stored) -> None:
        super()._witness(_, stored)
        if isinstance(stored.data, SAGA) and any(isinstance(each, ReconfigurationPlanned) for each in self.events):
            self.on(stored.data)

    async def _obey(self, _subject: str, payload: bytes) -> bytes | None:
        command = decode_command(payload)
        assert isinstance(command, Drain | Adopt)
        incarnation = self.incarnation
        if type(command) in self.deaf:
            return None
        await self.clock.sleep(self.chance.uniform(0, 0.4))
        if incarnation != self.incarnation or not self.beating:
            return None
        if (refusal := self.refuses.get(type(command))) is not None:
            return encode_message(refusal)
        if isinstance(command, Drain):
            if self.drains:
                await self.clock.sleep(self.chance.uniform(0, 2))
                if incarnation == self.incarnation:
                    self.agent.record(
                        [
                            DrainCompleted(
                                node=N0, node_epoch=1, workers=command.workers, returned_requests=1, drain_us=9
                            )
                        ]
                    )
            return encode_message(Accepted())
        return self._adopt(command)

    def _adopt(self, command: Adopt) -> bytes:
        if command.incarnation != self.incarnation or command.epoch < self.served:
            return encode_message(Refused(reason="stale-epoch", detail="it is served already"))
        self.served = command.epoch
        self.agent.record(adopted("n0", command.epoch, incarnation=self.incarnation, switch_us=5_000))
        if self.reconciles and any(
            isinstance(each, ReconfigurationPlanned) and each.epoch == command.epoch for each in self.events
        ):
            self.agent.record([PlacementReconciled(node=N0, epoch=command.epoch, workers=())])
        return encode_message(Accepted())

    def die(self) -> None:
        """The agent says that a rank died, and registers its next life a second later."""
        if self.restarting is not None:
            return
        self.agent.record([NodeLost(node=N0, incarnation=self.incarnation, reason="rank 3 died")])
        self.incarnation += 1
        self.restarting = asyncio.ensure_future(self._live_again(1))

    def vanish(self) -> None:
        """The agent's process is gone; another one registers ten seconds later."""
        if self.restarting is not None:
            return
        self.incarnation += 1
        self.beating = False
        self.restarting = asyncio.ensure_future(self._live_again(10))

    async def _live_again(self, after_s: float) -> None:
        await self.clock.sleep(after_s)
        committed = [each for each in self.events if isinstance(each, EpochCommitted)][-1]
        self.served = committed.epoch
        self.agent.record(
            [registered("n0", self.incarnation, epoch=committed.epoch, composition=committed.composition)]
        )
        self.beating = True


class Outcome(NamedTuple):
    """How a plan ended, and what a test may ask of it."""

    how: str
    node: Node
    members: tuple[Member, Member]


Fault = Callable[[Node, Member], None]


def at(kind: type[EventData], do: Callable[[Node, Member], None]) -> Fault:
    """`do`, when the first event of a kind of the saga is stored."""

    def fault(node: Node, leader: Member) -> None:
        done: list[bool] = []

        def on(data: EventData) -> None:
            if isinstance(data, kind) and not done:
                done.append(True)
                do(node, leader)

        node.on = on

    return fault


def _kill(node: Node, leader: Member) -> None:
    leader.kill()


def _away(node: Node, leader: Member) -> None:
    async def outage() -> None:
        node.log.away = node.cell.away = True
        await node.clock.sleep(node.chance.uniform(0.5, 8))
        node.log.away = node.cell.away = False

    node.restarting = asyncio.ensure_future(outage())


def _steal(node: Node, leader: Member) -> None:
    """The lease is lost while the leader works: the standby takes it, and both believe that they lead."""
    node.cell._content = None


def _freeze(node: Node, leader: Member) -> None:
    state = leader.controller.state
    node.restarting = asyncio.ensure_future(
        leader.leadership.decide(lambda: decider.freeze(state, Asker("ann", "")))  # type: ignore[arg-type]
    )


def _refuse(kind: type) -> Fault:
    return lambda node, leader: node.refuses.update({kind: Refused(reason="busy", detail="a rank is not ready")})


def _deafen(kind: type) -> Fault:
    return lambda node, leader: node.deaf.add(kind)


def _set(name: str) -> Fault:
    return lambda node, leader: setattr(node, name, False)


FAULTS: dict[str, Fault] = {
    "none": lambda node, leader: None,
    **{f"controller dies at {kind.TYPE}": at(kind, _kill) for kind in SAGA},
    **{f"two controllers race from {kind.TYPE}": at(kind, _steal) for kind in SAGA[:2]},
    "agent refuses the drain": _refuse(Drain),
    "drain does not end": _set("drains"),
    "agent does not hear the drain": _deafen(Drain),
    "rank dies before the switch": at(DrainStarted, lambda node, leader: node.die()),
    "rank dies during the switch": at(DrainCompleted, lambda node, leader: node.die()),
    "rank dies after the switch": at(RankAdoptedEpoch, lambda node, leader: node.die()),
    "agent refuses the switch": _refuse(Adopt),
    "agent dies while it drains": at(DrainStarted, lambda node, leader: node.vanish()),
    "agent dies after the switch": at(RankAdoptedEpoch, lambda node, leader: node.vanish()),
    "cachemgr is silent": _set("reconciles"),
    "NATS is away from the plan on": at(ReconfigurationPlanned, _away),
    "NATS is away from the switch on": at(DrainCompleted, _away),
    "an operator freezes the pool": at(DrainStarted, _freeze),
}


async def reconfigured(fault: str, seed: int) -> Outcome:
    """One node goes from OLD to NEW, or back, with a fault on its way."""
    node = Node(random.Random(f"{fault} {seed}"))
    await node.start(OLD)
    node.agent.record([registered("n0")])
    await node.live(2)
    leader = Member(node.controller, node.leadership, node.leading)
    standby = await node.lead("c2")
    await node.live(1)
    FAULTS[fault](node, leader)
    state = leader.controller.state
    deciding = asyncio.ensure_future(
        leader.leadership.decide(lambda: decider.reconfigure(state, N0, NEW, Asker("ann", "")))
    )
    await node.live(25)
    node.refuses.clear()
    node.deaf.clear()
    node.drains = node.reconciles = True
    await node.live(30)
    deciding.cancel()
    await asyncio.gather(deciding, return_exceptions=True)
    if node.restarting is not None:
        await node.restarting
    ends = [each for each in node.events if isinstance(each, EpochAborted) or _is_planned(each, node)]
    how = [f"aborted at {each.step}: {each.reason}" if isinstance(each, EpochAborted) else "committed" for each in ends]
    return Outcome(", ".join(how), node, (leader, standby))


def _is_planned(data: EventData, node: Node) -> bool:
    planned = {each.epoch for each in node.events if isinstance(each, ReconfigurationPlanned)}
    return isinstance(data, EpochCommitted) and data.epoch in planned
