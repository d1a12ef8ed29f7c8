"""The cache manager at work: scans, reconciles and has copies made while it leads; asks for reports of doubtful caches."""

import structlog

from services.cachemgr import decider
from services.cachemgr.carrying import Carrier
from services.cachemgr.decider import State
from services.cachemgr.metrics import Metrics
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    CacheReported,
    CacheScanCompleted,
    ReclamationFailed,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
)
from shared.contracts.ids import node_of
from shared.contracts.subjects import Subjects
from shared.model.holders import in_doubt
from shared.runtime.background import Background
from shared.runtime.clock import Clock
from shared.runtime.leadership import Leadership, NotLeading
from shared.runtime.ports import APPEND_ENTRIES_MAX, Bus
from shared.runtime.reports import ASK_EVERY_S, ask_for_reports

TICK_S = 0.25

AUDIT_EVERY_S = 60.0
"""Between two reports that are asked of workers in turn, though nothing is in doubt: a quarter of a megabyte of the log each,
for a cache of ten thousand blocks. A pool of a thousand workers has been through in 17 hours."""

OUTCOMES = (ReplicaInstalled, ReplicationFailed, ReplicaReclaimed, ReclamationFailed)


class CacheManager:
    """`state` is the projection's; only the log changes it."""

    def __init__(
        self, state: State, leadership: Leadership, bus: Bus, subjects: Subjects, clock: Clock, metrics: Metrics
    ) -> None:
        self.state = state
        self.leadership = leadership
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._metrics = metrics
        self._carrier = Carrier(bus, subjects, clock)
        self._scan_after_ns = 0
        self._ask_after_ns = 0
        self._audit_after_ns = clock.monotonic_ns() + round(AUDIT_EVERY_S * 1e9)
        self._audited = 0
        self._work = Background("cachemgr")
        self._logger = structlog.get_logger(component="cachemgr")

    async def start(self) -> None:
        """Begin to decide. The projection must have caught up."""
        self._work.start(self._run())

    async def stop(self) -> None:
        """Decide nothing more."""
        await self._work.stop()
        await self._carrier.stop()
        await self.leadership.stop()

    async def failed(self) -> Exception:
        """Returns when the cache manager can go on no longer: the process must end."""
        return await self._work.failed()

    def ready(self) -> str | None:
        """Why this process is of no use now, leader or standby."""
        return self.leadership.trouble(self.state.term)

    def folded(self, stored: Stored) -> None:
        """Show what is recorded, whoever leads."""
        if isinstance(stored.data, CacheScanCompleted):
            self._metrics.show_scan(stored.data)
        elif isinstance(stored.data, CacheReported):
            self._metrics.drifted_blocks.set(self.state.holders.drifted_blocks)
        elif isinstance(stored.data, OUTCOMES):
            self._metrics.operations.labels(stored.data.TYPE).inc()

    async def _run(self) -> None:
        while True:
            self._metrics.term.set(self.leadership.term or 0)
            if self.leadership.term is not None:
                await self._tick()
            leads = self.leadership.term is not None
            self._carrier.carry(decider.orders(self.state) if leads else {})
            await self._clock.sleep(min(TICK_S, self.state.parameters.scan_every_s))

    async def _tick(self) -> None:
        now_ns = self._clock.monotonic_ns()
        scan_is_due = now_ns >= self._scan_after_ns
        if scan_is_due:
            self._scan_after_ns = now_ns + round(self.state.parameters.scan_every_s * 1e9)
        try:
            await self.leadership.decide(
                lambda: [
                    # A scan names what follows it, so it is never cut short.
                    *(decider.scan(self.state) if scan_is_due else ()),
                    *decider.reconcile_placements(self.state),
                    *decider.settle(self.state, self._clock.now_ns(), self._carrier.told),
                ][:APPEND_ENTRIES_MAX]  # what is left is decided at the next tick
            )
        except NotLeading as error:
            # Whoever leads now decides it from the same log.
            self._logger.info("not decided", reason=str(error))
            return
        if now_ns >= self._ask_after_ns:
            self._ask_after_ns = now_ns + round(ASK_EVERY_S * 1e9)
            doubtful = in_doubt(self.state.holders, self.state.pool.alive)
            self._metrics.reports_asked.inc(len(doubtful))
            await ask_for_reports(self._bus, self._subjects, doubtful)
        if now_ns >= self._audit_after_ns:
            self._audit_after_ns = now_ns + round(AUDIT_EVERY_S * 1e9)
            await self._audit()

    async def _audit(self) -> None:
        """Have the next worker say what it holds: if that is not what is known of it, the fold counts and mends it."""
        alive = self.state.pool.alive
        workers = sorted(each.id for each in self.state.pool.workers.values() if each.node in alive)
        if workers:
            self._audited += 1
            worker = workers[self._audited % len(workers)]
            await ask_for_reports(self._bus, self._subjects, {node_of(worker): (worker,)})
