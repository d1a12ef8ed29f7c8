"""The cache manager's shell over the log in memory, with a clock that stands still until told."""

import random

from cache_world import ROUND, chain
from prometheus_client import CollectorRegistry

from services.cachemgr import decider
from services.cachemgr.metrics import Metrics
from services.cachemgr.shell import AUDIT_EVERY_S, CacheManager
from shared.contracts.commands import Accepted, Report, decode_command, encode_message
from shared.contracts.events import BlockRun, CacheReported
from shared.contracts.ids import NodeId, Source, WorkerId
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.lease import CellLease
from shared.runtime.memory import ManualClock, MemoryBus, MemoryCell, MemoryLog
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from tests.support.story import serving

SUBJECTS = Subjects("main")
W, OTHER = WorkerId("n0/1/0"), WorkerId("n0/1/1")


class Pool:
    """A leading manager, and node n0, which reports of each worker what `holds` says. `asked` has whom it was asked about."""

    def __init__(self) -> None:
        self.clock, self.log, self.registry = ManualClock(), MemoryLog(), CollectorRegistry()
        self.bus = MemoryBus(self.clock)
        self.holds = {W: "a b", OTHER: ""}
        self.asked: list[WorkerId] = []

    def _sealer(self, name: str) -> Sealer:
        return Sealer(Identity("main", Source(name), name), SUBJECTS, self.clock, Ids(self.clock, random.Random(name)))

    async def start(self) -> None:
        agent = Projection(self.log, [SUBJECTS.all_events], None, lambda state, stored: None)
        await agent.start()
        self.agent = Outbox(agent, self._sealer("n0"), self.clock)
        await self.agent.start()
        await self.bus.subscribe(SUBJECTS.agent(NodeId("n0")), self._obey)
        self.state = decider.initial(ROUND)
        projection = Projection(self.log, [SUBJECTS.all_events], self.state, decider.evolve)
        leadership = Leadership(
            CellLease(MemoryCell(), "m1", self.clock),
            projection,
            Fence(projection, self._sealer("m1"), SUBJECTS.cache_control, self.clock),
            lambda lease_term: [decider.take_leadership(self.state, "m1", lease_term)],
            self.clock,
        )
        self.manager = CacheManager(self.state, leadership, self.bus, SUBJECTS, self.clock, Metrics(self.registry))
        projection.listen(self.manager.folded)
        await projection.start()
        await leadership.start()
        await self.manager.start()
        self.agent.record([*serving("n0", (1, 1)), *(self._report(each) for each in (W, OTHER))])
        await self.clock.advance(1)

    def _report(self, worker: WorkerId) -> CacheReported:
        blocks = b"".join(chain(self.holds[worker]))
        runs = (BlockRun(block_ids=blocks),) if blocks else ()
        return CacheReported(worker=worker, incarnation=1, number=1, part=1, parts=1, runs=runs)

    async def _obey(self, _subject: str, payload: bytes) -> bytes:
        command = decode_command(payload)
        assert isinstance(command, Report)
        self.asked += command.workers
        self.agent.record([self._report(each) for each in command.workers])
        return encode_message(Accepted())

    @property
    def drifted(self) -> float | None:
        return self.registry.get_sample_value("vertumnus_cache_drifted_blocks")


async def test_one_worker_a_minute_says_what_it_holds_and_what_was_believed_wrongly_is_counted_and_mended() -> None:
    pool = Pool()
    await pool.start()
    index = pool.state.holders.index
    assert [index.counts.get(each, 0) for each in (W, OTHER)] == [2, 0]
    assert pool.asked == [], "nothing is in doubt"
    pool.holds[W] = "a c"  # b went and c came, and no event said so
    for minute in (1, 2, 3):
        await pool.clock.advance(AUDIT_EVERY_S)
        assert len(pool.asked) == minute
    assert set(pool.asked) == {W, OTHER}, "in turn"
    assert pool.drifted == 2
    assert pool.state.holders.matched(chain("a c")) == {W: 2}
    assert pool.state.holders.matched(chain("a b")) == {W: 1}
    pool.state.trie.check(pool.state.holders)
