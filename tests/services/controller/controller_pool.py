"""The controller's shell over the in-memory log and bus, with a clock that stands still until told, and a node that obeys."""

import random
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from services.controller import decider
from services.controller.epochs import Configured
from services.controller.forecast import Question, Scores
from services.controller.forecaster import Forecasts
from services.controller.metrics import Metrics
from services.controller.replaying import scores
from services.controller.shell import Controller, Epochs
from shared.contracts.commands import Accepted, Adopt, Drain, NodeLoad, Reply, decode_command, encode_message
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import DrainCompleted, PlacementReconciled, ReconfigurationPlanned
from shared.contracts.ids import NodeId, Source
from shared.contracts.subjects import Subjects
from shared.model.capacity import Capacities
from shared.model.cost import load_coefficients
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.lease import CellLease
from shared.runtime.memory import ManualClock, MemoryBus, MemoryCell, MemoryLog
from shared.runtime.outbox import Outbox
from shared.runtime.ports import Unavailable
from shared.runtime.projection import Projection
from tests.support.story import adopted

N0 = NodeId("n0")
SUBJECTS = Subjects("main")


class Cell(MemoryCell):
    """A record on a server that may be `away`."""

    away = False

    async def write(self, value: bytes, revision: int) -> int:
        if self.away:
            raise Unavailable("the server is away")
        return await super().write(value, revision)


class Member(NamedTuple):
    """One controller process."""

    controller: Controller
    leadership: Leadership
    projection: Projection[decider.State]

    def kill(self) -> None:
        """Everything it does ends here, and it gives nothing back."""
        for each in (self.controller._work, self.leadership._keeper):
            assert each._task is not None, "it was started"
            each._task.cancel()
        self.leadership.term = None


class Pool:
    """One controller, and node n0 as its agent would behave. `drains` and `reconciles` say whether the agent ends a drain and
    whether a cache manager answers; `reply` is the answer to `adopt`, `drain_reply` to `drain`, None for silence."""

    def __init__(self) -> None:
        self.clock, self.log = ManualClock(), MemoryLog()
        self.bus = MemoryBus(self.clock)
        self.registry = CollectorRegistry()
        self.events: list[EventData] = []
        self.log_of: list[Stored] = []
        self.commands: list[Adopt] = []
        self.drain_orders: list[Drain] = []
        self.reply: Reply | None = Accepted()
        self.drain_reply: Reply | None = Accepted()
        self.drains = self.reconciles = True
        self.beating = True
        self.incarnation = 1
        self.cell = Cell()

    def _sealer(self, name: str) -> Sealer:
        return Sealer(Identity("main", Source(name), name), SUBJECTS, self.clock, Ids(self.clock, random.Random(name)))

    def _witness(self, _: None, stored: Stored) -> None:
        self.log_of.append(stored)
        self.events.append(stored.data)

    async def start(self, composition: tuple[int, ...] = (4, 4)) -> None:
        await Projection(self.log, [SUBJECTS.all_events], None, self._witness).start()
        agent = Projection(self.log, [SUBJECTS.all_events], None, lambda state, stored: None)
        await agent.start()
        self.agent = Outbox(agent, self._sealer("n0"), self.clock)
        await self.agent.start()
        await self.bus.subscribe(SUBJECTS.agent(N0), self._obey)
        self.composition = composition
        first = await self.lead("c1")
        self.controller, self.leadership, self.leading = first

    async def lead(self, name: str) -> "Member":
        """One more controller; the first to come leads."""
        state = decider.initial()
        projection = Projection(self.log, [SUBJECTS.all_events], state, decider.evolve)
        leadership = Leadership(
            CellLease(self.cell, name, self.clock),
            projection,
            Fence(projection, self._sealer(name), SUBJECTS.control, self.clock),
            lambda lease_term: [decider.take_leadership(state, name, lease_term)],
            self.clock,
        )
        controller = Controller(
            state,
            leadership,
            self.bus,
            SUBJECTS,
            self.clock,
            Epochs(Configured(self.composition, {}), 0.5, Capacities(version="p-1", capacity_shares={8: 1.25})),
            Metrics(self.registry if name == "c1" else CollectorRegistry()),
            Forecasts(self, load_coefficients("qwen3_30b_a3b_h20")),
        )
        projection.listen(controller.folded)
        await projection.start()
        await leadership.start()
        await controller.start()
        await self.clock.advance(0)
        return Member(controller, leadership, projection)

    async def scores(self, question: Question) -> Scores:
        """A forecast's answer takes half a second."""
        await self.clock.sleep(0.5)
        return scores(question)

    async def _obey(self, _subject: str, payload: bytes) -> bytes | None:
        command = decode_command(payload)
        if isinstance(command, Drain):
            return self._drain(command)
        assert isinstance(command, Adopt)
        self.commands.append(command)
        if isinstance(self.reply, Accepted):
            self.agent.record(adopted("n0", command.epoch, incarnation=command.incarnation))
            if self.reconciles and any(isinstance(each, ReconfigurationPlanned) for each in self.events):
                self.agent.record([PlacementReconciled(node=N0, epoch=command.epoch, workers=())])
        return encode_message(self.reply) if self.reply else None

    def _drain(self, command: Drain) -> bytes | None:
        self.drain_orders.append(command)
        if self.drains and isinstance(self.drain_reply, Accepted):
            drained = DrainCompleted(
                node=N0, node_epoch=1, workers=command.workers, returned_requests=0, drain_us=700_000
            )
            self.agent.record([drained])
        return encode_message(self.drain_reply) if self.drain_reply else None

    async def live(self, seconds: int, incarnation: int | None = None) -> None:
        """Time passes, with a heartbeat each second."""
        for _ in range(seconds):
            if self.beating:
                number = incarnation or self.incarnation
                load = NodeLoad(
                    node=N0, incarnation=number, epoch=1, queued={}, running={}, used_blocks=0, free_blocks=0
                )
                await self.bus.publish(SUBJECTS.load(N0), encode_message(load))
            await self.clock.advance(1)

    def all(self, kind: type[EventData]) -> list[EventData]:
        return [each for each in self.events if isinstance(each, kind)]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)
