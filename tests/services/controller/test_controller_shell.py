"""The controller's shell over the in-memory log and bus, with a clock that stands still until told."""

import random

from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.controller import decider
from services.controller.epochs import Configured
from services.controller.metrics import Metrics
from services.controller.shell import Controller, Epochs
from shared.contracts.commands import Accepted, Adopt, NodeLoad, Refused, Reply, decode_command, encode_message
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import EpochCommitted, LeadershipTaken, NodeDeclaredLost, WindowClosed
from shared.contracts.ids import NodeId, Source
from shared.contracts.subjects import Subjects
from shared.model.capacity import Capacities
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.lease import CellLease
from shared.runtime.memory import ManualClock, MemoryBus, MemoryCell, MemoryLog
from shared.runtime.outbox import Outbox
from shared.runtime.ports import Unavailable
from shared.runtime.projection import Projection
from tests.support.story import adopted, registered

N0 = NodeId("n0")
SUBJECTS = Subjects("main")


class Cell(MemoryCell):
    """A record on a server that may be `away`."""

    away = False

    async def write(self, value: bytes, revision: int) -> int:
        if self.away:
            raise Unavailable("the server is away")
        return await super().write(value, revision)


class Pool:
    """One controller, and node n0 as its agent would behave."""

    def __init__(self) -> None:
        self.clock, self.log = ManualClock(), MemoryLog()
        self.bus = MemoryBus(self.clock)
        self.registry = CollectorRegistry()
        self.events: list[EventData] = []
        self.commands: list[Adopt] = []
        self.reply: Reply = Accepted()
        self.beating = True
        self.cell = Cell()

    def _sealer(self, name: str) -> Sealer:
        return Sealer(Identity("main", Source(name), name), SUBJECTS, self.clock, Ids(self.clock, random.Random(name)))

    def _witness(self, _: None, stored: Stored) -> None:
        self.events.append(stored.data)

    async def start(self, composition: tuple[int, ...] = (4, 4)) -> None:
        agent = Projection(self.log, [SUBJECTS.all_events], None, self._witness)
        await agent.start()
        self.agent = Outbox(agent, self._sealer("n0"), self.clock)
        await self.agent.start()
        await self.bus.subscribe(SUBJECTS.agent(N0), self._obey)
        state = decider.initial()
        projection = Projection(self.log, [SUBJECTS.all_events], state, decider.evolve)
        self.leadership = Leadership(
            CellLease(self.cell, "c1", self.clock),
            projection,
            Fence(projection, self._sealer("c1"), SUBJECTS.control, self.clock),
            lambda lease_term: decider.take_leadership(state, "c1", lease_term),
            self.clock,
        )
        self.controller = Controller(
            state,
            self.leadership,
            self.bus,
            SUBJECTS,
            self.clock,
            Epochs(Configured(composition, {}), 0.5, Capacities(version="p-1", capacity_shares={8: 1.25})),
            Metrics(self.registry),
        )
        projection.listen(self.controller.folded)
        await projection.start()
        await self.leadership.start()
        await self.controller.start()
        await self.clock.advance(0)

    async def _obey(self, _subject: str, payload: bytes) -> bytes:
        command = decode_command(payload)
        assert isinstance(command, Adopt)
        self.commands.append(command)
        if isinstance(self.reply, Accepted):
            self.agent.record(adopted("n0", command.epoch, incarnation=command.incarnation))
        return encode_message(self.reply)

    async def live(self, seconds: int, incarnation: int = 1) -> None:
        """Time passes, with a heartbeat each second."""
        load = NodeLoad(node=N0, incarnation=incarnation, epoch=1, queued={}, running={}, used_blocks=0, free_blocks=0)
        for _ in range(seconds):
            if self.beating:
                await self.bus.publish(SUBJECTS.load(N0), encode_message(load))
            await self.clock.advance(1)

    def all(self, kind: type[EventData]) -> list[EventData]:
        return [each for each in self.events if isinstance(each, kind)]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def test_a_node_adopts_and_is_committed() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(1)
    [epoch] = pool.all(EpochCommitted)
    assert (epoch.composition, {each.capacity_us for each in epoch.workers}) == ((4, 4), {10_000_000})
    assert {each.capacity_version for each in epoch.workers} == {None}, "an estimate names no set"
    assert len(pool.commands) == 1


async def test_a_profiled_degree_has_the_capacity_of_its_profile() -> None:
    pool = Pool()
    await pool.start(composition=(8,))
    pool.agent.record([registered("n0")])
    await pool.live(1)
    [epoch] = pool.all(EpochCommitted)
    assert [(each.capacity_us, each.capacity_version) for each in epoch.workers] == [(25_000_000, "p-1")]


async def test_a_misfit_is_said_once_and_tried_again_with_the_next_life() -> None:
    pool = Pool()
    await pool.start(composition=(2, 2))
    pool.agent.record([registered("n0")])
    await pool.live(3)
    assert pool.metric("vertumnus_epoch_refusals_total", node="n0", reason="misfit") == 1
    assert not pool.commands
    pool.agent.record([registered("n0", incarnation=2)])
    await pool.live(3, incarnation=2)
    assert pool.metric("vertumnus_epoch_refusals_total", node="n0", reason="misfit") == 2
    pool.agent.record([registered("n0", incarnation=3, ranks=4)])
    pool.reply = Refused(reason="busy")
    await pool.live(1, incarnation=3)
    assert [each.composition for each in pool.commands][:1] == [(2, 2)]


async def test_refusals_are_repeated_each_second_and_a_stale_number_is_left() -> None:
    pool = Pool()
    await pool.start()
    pool.reply = Refused(reason="busy")
    pool.agent.record([registered("n0")])
    await pool.live(4)
    assert 3 <= len(pool.commands) <= 4
    pool.reply = Refused(reason="stale-epoch", detail="epoch: 1 is not above 1")
    await pool.live(2)
    pool.reply = Accepted()
    await pool.live(2)
    assert pool.commands[0].epoch == 1
    [epoch] = pool.all(EpochCommitted)
    assert epoch.epoch > 1
    assert pool.commands[-1].epoch == epoch.epoch


async def test_a_repeated_refusal_is_logged_once() -> None:
    pool = Pool()
    with capture_logs() as logged:
        await pool.start()
        pool.reply = Refused(reason="draining")
        pool.agent.record([registered("n0")])
        await pool.live(4)
        pool.reply = Refused(reason="busy")
        await pool.live(4)
        pool.reply = Accepted()
        await pool.live(2)
        pool.reply = Refused(reason="busy")
        pool.agent.record([registered("n0", incarnation=2)])
        await pool.live(4, incarnation=2)
    said = [(each["incarnation"], each["reason"]) for each in logged if each["event"] == "epoch not adopted"]
    assert said == [(1, "draining"), (1, "busy"), (2, "busy")]
    assert len(pool.commands) > 8, "it was asked again and again"


async def test_silence_is_noticed_and_deafness_forgives_it() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(8)
    pool.controller._ticked_ns -= 10 * 10**9  # the process stood still: the next tick comes late
    pool.beating = False
    await pool.live(4)
    assert not pool.all(NodeDeclaredLost)
    await pool.live(2)
    [lost] = pool.all(NodeDeclaredLost)
    assert lost.silent_us >= 5_000_000


async def test_nobody_is_lost_while_the_servers_are_away() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(8)
    pool.cell.away, pool.beating = True, False
    await pool.live(20)
    assert pool.controller.ready() == "the lease cannot be renewed"
    pool.cell.away = False
    await pool.live(4)
    assert not pool.all(NodeDeclaredLost)
    await pool.live(5)
    assert len(pool.all(NodeDeclaredLost)) == 1


async def test_windows_close_on_time_and_are_shown() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(41)
    windows = pool.all(WindowClosed)
    assert [each.k for each in windows] == [1, 2]
    assert all(20_000_000 <= each.length_us <= 20_300_000 for each in windows)
    assert windows[1].from_seq == windows[0].to_seq
    assert pool.metric("vertumnus_window_capacity_seconds") == windows[1].capacity_us / 1e6
    assert pool.metric("vertumnus_controller_term") == 1


async def test_a_standby_decides_nothing_and_knows_why_it_is_not_ready() -> None:
    pool = Pool()
    await pool.start()
    assert pool.controller.ready() is None
    assert pool.leadership.trouble(0) == "nobody has led yet"
    await pool.leadership.stop()
    pool.agent.record([registered("n0")])
    await pool.live(30)
    assert [type(each) for each in pool.events if not isinstance(each, LeadershipTaken)] == [type(registered())]
    assert not pool.commands


async def test_what_is_no_heartbeat_is_counted() -> None:
    pool = Pool()
    await pool.start()
    await pool.bus.publish(SUBJECTS.load(N0), b"{")
    await pool.bus.publish(f"{SUBJECTS.root}.alive.r1", b"[]")
    await pool.clock.advance(0)
    assert pool.metric("vertumnus_unreadable_heartbeats_total") == 2


async def test_more_losses_than_one_append_holds_take_two() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered(f"m{number}") for number in range(150)])
    await pool.live(8)
    assert len(pool.all(NodeDeclaredLost)) == 150
