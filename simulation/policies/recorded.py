"""A recorded run as a simulation: its arrivals, its pool, its parameters, and how its steps compare with their predictions.

What is simulated begins `WARM_UP_NS` before the range that is asked for, if the record does, so that caches are not empty at
its beginning. The pool and the parameters are those of the first arrival in the range.
"""

from collections import Counter
from collections.abc import Callable
from statistics import fmean, pstdev
from typing import NamedTuple

from replay import history, keeping
from replay.freezing import known
from replay.verifying import Span
from services.ledger import database, reading
from services.worker.composer import StepLimits
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    EpochCommitted,
    NodeRegistered,
    ParametersChanged,
    PrefillCompleted,
    RequestAssigned,
    RequestCompleted,
    RequestReceived,
)
from shared.contracts.events.requests import ENDS
from shared.contracts.ids import NodeId, RequestId, Source, node_of, unpack_block_ids
from shared.model import parameters as parameters_model
from shared.model import pool as pool_model
from shared.model.cost import US_PER_S, Coefficients
from shared.model.lattice import Composition
from shared.model.parameters import Parameters
from shared.model.pool import Pool
from simulation.policies.agenda import NS_PER_S
from simulation.policies.outcome import Outcome, Rows, outcome
from simulation.policies.routers import Asked, Ended
from simulation.policies.setup import STEP_LIMITS, Setup

WARM_UP_NS = 1_800 * NS_PER_S
"""Longer than most cached blocks are kept under load."""

ARRIVALS_MAX = 500_000
"""A day at 6 requests/s; each keeps its block ids in memory."""


class NoRun(ValueError):
    """The record has nothing in the range that could be simulated. The message says why."""


class Recorded(NamedTuple):
    """A run, and the setup that simulates it. `requests` begin `warmup_s` before the range; `notes` say what was left out."""

    setup: Setup
    requests: tuple[Asked, ...]
    warmup_s: float
    outcome: Outcome
    notes: tuple[str, ...]


class _Begin(NamedTuple):
    """What held at the first arrival of the range."""

    at_ns: int
    compositions: dict[NodeId, Composition]
    specs: dict[NodeId, NodeRegistered]
    parameters: Parameters


class Run:
    """Is given every event of a log in order. Pure."""

    def __init__(self, span: Span, coefficients: dict[Source, Coefficients]) -> None:
        self._span = span
        self._known = coefficients
        self._pool = Pool()
        self._parameters = Parameters()
        self._begin: _Begin | None = None
        self._arrived: dict[RequestId, tuple[int, RequestReceived]] = {}
        self._of_range: set[RequestId] = set()
        self._assigned: dict[RequestId, RequestAssigned] = {}
        self._ends: list[tuple[RequestId, RequestAssigned | None, RequestCompleted | None]] = []
        self._ratios: dict[NodeId, list[float]] = {}
        self._times_us: dict[NodeId, tuple[int, int]] = {}
        self._overheads_us: list[int] = []
        self._sources: Counter[Source] = Counter()
        self._busy_gpu_us = 0
        self._last_ns = 0
        self._changed: Counter[str] = Counter()

    def fold(self, stored: Stored) -> None:
        """The next event."""
        pool_model.evolve(self._pool, stored)
        self._parameters = parameters_model.evolve(self._parameters, stored)
        data = stored.data
        match data:
            case RequestReceived():
                self._receive(stored, data)
            case RequestAssigned() if data.request in self._of_range:
                self._assigned[data.request] = data
            case PrefillCompleted() if data.request in self._of_range:
                self._measure(data)
            case EpochCommitted() | ParametersChanged() if self._begin and self._span.holds(stored):
                self._changed[data.TYPE] += 1
            case ended if isinstance(ended, ENDS) and ended.request in self._of_range:
                completed = ended if isinstance(ended, RequestCompleted) else None
                self._ends.append((ended.request, self._assigned.pop(ended.request, None), completed))
                if completed is not None:
                    self._overheads_us.append(completed.handoff_us)
                self._last_ns = max(self._last_ns, stored.event.time_ns)
            case _:
                pass

    def _receive(self, stored: Stored, data: RequestReceived) -> None:
        if data.known_blocks:
            raise NoRun(f"request {data.request}: its block chain is of another version")
        if self._span.holds(stored):
            self._of_range.add(data.request)
            self._sources[Source(stored.event.source)] += 1
            if self._begin is None:
                self._begin = self._begun(stored.event.time_ns)
        elif self._begin is not None:
            return
        self._arrived[data.request] = stored.event.time_ns, data
        if len(self._arrived) > ARRIVALS_MAX:
            raise NoRun(
                f"the range and the half hour before it have more than {ARRIVALS_MAX} requests; choose a shorter one"
            )
        oldest_ns = stored.event.time_ns - WARM_UP_NS
        while self._begin is None and (first := next(iter(self._arrived))) and self._arrived[first][0] < oldest_ns:
            del self._arrived[first]

    def _begun(self, now_ns: int) -> _Begin:
        nodes = [
            node for node in self._pool.nodes.values() if node.alive and node.spec is not None and node.composition
        ]
        if not nodes:
            raise NoRun("no node served when the first request of the range arrived")
        return _Begin(
            now_ns,
            {node.id: node.composition for node in sorted(nodes, key=lambda node: node.id)},
            {node.id: node.spec for node in nodes if node.spec is not None},
            self._parameters,
        )

    def _measure(self, data: PrefillCompleted) -> None:
        worker = self._pool.workers.get(data.worker)
        if data.predicted_us:
            node = node_of(data.worker)
            measured_us, predicted_us = self._times_us.get(node, (0, 0))
            self._times_us[node] = measured_us + data.prefill_us, predicted_us + data.predicted_us
            self._ratios.setdefault(node, []).append(data.prefill_us / data.predicted_us)
        if worker is not None:
            self._busy_gpu_us += worker.degree * data.prefill_us

    # --- what came of it

    def recorded(self) -> Recorded:
        """The run so far. Errors: NoRun."""
        begin = self._begin
        if begin is None:
            raise NoRun("no request arrived in that range")
        first_ns = min(at_ns for at_ns, _ in self._arrived.values())
        by_time = sorted(self._arrived.values(), key=lambda each: each[0])
        asked = {data.request: _asked(at_ns - first_ns, data) for at_ns, data in by_time}
        rows = Rows()
        for request, assigned, completed in self._ends:
            rows.add(Ended(asked[request], self._arrived[request][1].slo_us, assigned, completed))
        if not len(rows):
            raise NoRun("no request of that range was completed")
        seconds = (self._last_ns - begin.at_ns) / NS_PER_S
        setup = self._setup(begin)
        moved = self._changed[EpochCommitted.TYPE]
        measured = outcome(rows, self._busy_gpu_us / US_PER_S, setup.gpus, 0, moved, seconds, 0)
        return Recorded(
            setup, tuple(asked.values()), (begin.at_ns - first_ns) // 1_000 / US_PER_S, measured, self._notes()
        )

    def _setup(self, begin: _Begin) -> Setup:
        spec = next(iter(begin.specs.values()))
        for other in begin.specs.values():
            if (other.block_tokens, other.blocks_per_rank) != (spec.block_tokens, spec.blocks_per_rank):
                raise NoRun(f"nodes {spec.node} and {other.node} differ in the size or number of their KV blocks")
        chunk = spec.chunk_tokens
        ratios = {node: measured_us / predicted_us for node, (measured_us, predicted_us) in self._times_us.items()}
        own = [ratio / ratios[node] for node, found in self._ratios.items() for ratio in found]
        named = dict(
            zip(begin.compositions, Setup(tuple(begin.compositions.values()), self._cost()).nodes, strict=True)
        )
        # Compositions are those at the beginning: without this, `forecast` would go on changing them.
        left = {"version", "frozen", "reconfiguration_policy"}
        changes = begin.parameters.model_dump(exclude=left, exclude_defaults=True)
        return Setup(
            compositions=tuple(begin.compositions.values()),
            coefficients=self._cost(),
            parameters=changes,
            block_tokens=spec.block_tokens,
            blocks_per_rank=spec.blocks_per_rank,
            step_limits=StepLimits(2 * chunk, chunk) if chunk else STEP_LIMITS,
            context_tokens_max=spec.prompt_tokens_max + 1,
            kv_bytes_per_token=spec.kv_bytes_per_token,
            noise_sd=min(1.0, pstdev(own)) if len(own) > 1 else 0.0,
            stragglers={named[node]: ratio for node, ratio in ratios.items() if node in named},
            dispatch_s=fmean(self._overheads_us) / US_PER_S,
            routers=len(self._sources),
        )

    def _cost(self) -> Coefficients:
        """What most of the range's requests were priced by."""
        [(source, _)] = self._sources.most_common(1)
        if (found := self._known.get(source)) is None:
            raise NoRun(f"router {source} did not say which coefficients it began with")
        return found

    def _notes(self) -> tuple[str, ...]:
        notes = [
            f"{count} {kind} in the range: both simulations keep what held at its beginning"
            for kind, count in self._changed.items()
        ]
        if open_requests := len(self._of_range) - len(self._ends):
            notes.append(
                f"{open_requests} requests had no end yet: they are simulated, and missing in the recorded run"
            )
        if self._ratios:
            mean = fmean(ratio for found in self._ratios.values() for ratio in found)
            notes.append(
                f"recorded steps took {mean:.3f} of their prediction; each node is simulated at its own median"
            )
        return tuple(notes)


def _asked(after_ns: int, data: RequestReceived) -> Asked:
    return Asked(after_ns, data.prompt_tokens, tuple(unpack_block_ids(data.block_ids)), data.slo_us)


async def recorded_run(database_url: str, span: Span, progress: Callable[[int], None]) -> Recorded:
    """The run of a range, out of one view of the record; sequences in `span` are those of the newest log.

    Errors: NoRun; BadState; those of `database.connect`.
    """
    async with database.view(database_url) as connection:
        logs = await reading.logs(connection)
        if not logs:
            raise NoRun("the record is empty")
        newest = logs[-1]
        frozen = await keeping.first(connection, newest)
        begun = known(frozen, await history.registrations(connection, newest.log))
        models = {each.source: model for each in begun if (model := each.begun.cost_model()) is not None}
        run, events = Run(span, models), 0
        for inherited in await history.inherited(connection, logs, newest):
            run.fold(inherited)
        async for page in history.pages(connection, newest):
            for stored in page:
                run.fold(stored)
            events += len(page)
            progress(events)
        return run.recorded()
