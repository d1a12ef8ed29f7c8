"""What a node agent knows and says: the node's incarnation, its geometry, its jobs and its numbered cache events.

State is the log's control subject and the node's own subject, folded, plus two things that are promises and not facts: the
jobs on the desk, and the geometry that the engine serves between `adopt` and its commit. Rules:

1.  An incarnation is one life of the node's engine, numbered from 1 without a repeat. Exactly one is alive at a time.
2.  An accepted assignment ends in exactly one of `prefill-completed` and `prefill-aborted`.
3.  Cache events are numbered from 1 without a gap per worker and incarnation. Evictions go before the stores they made
    room for.
4.  Commands of a term lower than the highest seen are refused; so are geometries older than the committed one.

Every decision is pure and safe to repeat: what is said already gives [].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from services.worker.cache_events import changes
from services.worker.desk import Desk
from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.protocol import EngineDescription, HandedOff, ItemResult
from services.worker.job import Fetched, Job, Stage
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    AbortReason,
    BlocksEvicted,
    BlocksStored,
    EpochCommitted,
    Frozen,
    KvHandedOff,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RankAdoptedEpoch,
    RouterLost,
    Thawed,
)
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, NodeId, WorkerId, epoch_of, worker_id
from shared.model import parameters as parameters_model
from shared.model.cost import US_PER_S
from shared.model.lattice import Composition, Group, degree_min, groups_of
from shared.model.lost_routers import LostRouters
from shared.model.parameters import Parameters


class Geometry(NamedTuple):
    """An epoch of this node. Epoch 0 is none: no workers."""

    epoch: int
    composition: Composition

    def workers(self, node: NodeId) -> dict[WorkerId, Group]:
        """From rank 0 up."""
        groups = groups_of(self.composition) if self.composition else ()
        return {worker_id(node, self.epoch, group.first_rank): group for group in groups}


NO_GEOMETRY = Geometry(0, ())


@dataclass(slots=True)
class State:
    """`evolve` and `serve` are its writers; the desk changes by its own methods, and an order that is obeyed raises `term`
    before the log does. `held_blocks` counts what the incarnation has stored and not evicted, per worker served."""

    node: NodeId
    desk: Desk
    incarnation: int = 0
    alive: bool = False
    term: int = 0
    committed: Geometry = NO_GEOMETRY
    served: Geometry = NO_GEOMETRY
    numbers: dict[WorkerId, int] = field(default_factory=dict)
    held_blocks: dict[WorkerId, int] = field(default_factory=dict)
    lost_routers: LostRouters = field(default_factory=LostRouters)
    parameters: Parameters = field(default_factory=Parameters)


class Prefilled(NamedTuple):
    """A job's last step, what the worker lost for it, and what all of the job's steps came to.

    `queue_us` is everything between acceptance and first token that is not `prefill_us` or the job's fetch: the queue, the time
    between its chunks, and of packed steps the others' share. `cached_tokens` were not computed, wherever they came from.
    """

    item: ItemResult
    evicted: tuple[BlockId, ...]
    queue_us: int
    prefill_us: int
    predicted_us: int
    computed_tokens: int
    cached_tokens: int
    steps: int
    past: Past = NO_PAST

    @classmethod
    def of(cls, job: Job, item: ItemResult, evicted: tuple[BlockId, ...], since_us: int) -> "Prefilled":
        """The last step of `job`, which was accepted `since_us` ago without its fetch."""
        done = job.progress
        return cls(
            item,
            evicted,
            queue_us=max(0, since_us - done.measured_us),
            prefill_us=done.measured_us,
            predicted_us=done.predicted_us,
            computed_tokens=done.computed_tokens,
            cached_tokens=job.assign.prompt_tokens - done.computed_tokens,
            steps=done.steps,
        )


def initial(node: NodeId, queue_max: int) -> State:
    """Before the first event."""
    return State(node, Desk(queue_max))


def evolve(state: State, stored: Stored) -> None:
    """Fold one event. Other nodes' events leave the state as it is."""
    match stored.data:
        case PrefillStarted() | PrefillCompleted() | PrefillAborted() as data:
            if stored.stream_seq == 0:
                _move(state.desk, data)
        case BlocksStored() as data:
            state.numbers[data.worker] = data.number
            state.held_blocks[data.worker] = state.held_blocks.get(data.worker, 0) + data.blocks
        case BlocksEvicted() as data:
            state.numbers[data.worker] = data.number
            evicted = len(data.block_ids) // BLOCK_ID_BYTES
            state.held_blocks[data.worker] = max(0, state.held_blocks.get(data.worker, 0) - evicted)
        case NodeRegistered() as data if data.node == state.node:
            state.incarnation, state.alive = max(state.incarnation, data.incarnation), True
            state.numbers = {}
        case NodeLost() | NodeDeclaredLost() as data if data.node == state.node:
            state.incarnation = max(state.incarnation, data.incarnation)
            state.alive = state.alive and data.incarnation < state.incarnation
        case RankAdoptedEpoch() as data if data.node == state.node:
            state.incarnation = max(state.incarnation, data.incarnation)
        case EpochCommitted() as data if data.node == state.node:
            state.committed = Geometry(data.epoch, data.composition)
        case LeadershipTaken() as data:
            state.term = max(state.term, data.term)
        case RouterLost() as data:
            state.lost_routers.add(data.source)
        case ParametersChanged() | Frozen() | Thawed():
            state.parameters = parameters_model.evolve(state.parameters, stored)
        case _:
            pass


def _move(desk: Desk, data: PrefillStarted | PrefillCompleted | PrefillAborted) -> None:
    """What this process has recorded itself; another's events, of an earlier life or of a usurper, move no job here."""
    job = desk.find(data.request, data.attempt)
    assert job is not None, f"{data.TYPE} of {data.request}/{data.attempt}, which is not on the desk"
    match data:
        case PrefillStarted():
            desk.start(job)
        case PrefillCompleted():
            desk.stream(job)
        case PrefillAborted():
            desk.end(job)
        case _:
            assert_never(data)


def serve(state: State, geometry: Geometry, held_blocks: dict[WorkerId, int]) -> None:
    """The engine serves `geometry` from now on, and its workers hold this much."""
    state.served = geometry
    state.held_blocks = held_blocks
    state.desk.open_workers(list(geometry.workers(state.node)))


# --- the node's life


def register(
    state: State, engine: EngineDescription, coefficients_version: str, chunk_tokens: int | None = None
) -> list[EventData]:
    """The next incarnation; one that the log still believes alive ends first. `chunk_tokens` is as the event has it."""
    rank_tokens, cyclic = engine.blocks_per_rank * engine.block_tokens, engine.kv_layout == "cyclic"
    least_tokens = min(chunk_tokens or 1, engine.prompt_tokens_max)
    registered = NodeRegistered(
        node=state.node,
        incarnation=state.incarnation + 1,
        engine=engine.engine,
        model=engine.model,
        model_revision=engine.model_revision,
        tokenizer_revision=engine.tokenizer_revision,
        dtype=engine.dtype,
        kv_layout=engine.kv_layout,
        block_tokens=engine.block_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        prefill_ranks=engine.prefill_ranks,
        decode_ranks=engine.decode_ranks,
        degrees=engine.degrees,
        blocks_per_rank=engine.blocks_per_rank,
        prompt_tokens_max=engine.prompt_tokens_max,
        coefficients_version=coefficients_version,
        epoch=state.served.epoch,
        composition=state.served.composition,
        chunk_tokens=chunk_tokens,
        fetches=engine.moves_kv,
        decode_sequences=engine.decode_sequences,
        hands_off=engine.lends,
        evicts=engine.evicts,
        degree_min=degree_min(engine.degrees, rank_tokens, least_tokens, cyclic=cyclic),
    )
    return [*lose(state, "the agent was restarted"), registered]


def lose(state: State, reason: str) -> list[EventData]:
    """The incarnation ends; `abort_job` ends each of its jobs."""
    return [NodeLost(node=state.node, incarnation=state.incarnation, reason=reason)] if state.alive else []


# --- a job's life


def start(job: Job, queue_us: int) -> list[EventData]:
    """A queued job begins the first of its steps; the others are not announced."""
    if job.stage is not Stage.QUEUED or job.started:
        return []
    return [
        PrefillStarted(
            request=job.assign.request, attempt=job.assign.attempt, worker=job.assign.worker, queue_us=queue_us
        )
    ]


def complete(state: State, job: Job, prefilled: Prefilled) -> list[EventData]:
    """A running step has given the first token; the prompt's blocks are the worker's."""
    if job.stage is not Stage.RUNNING:
        return []
    fetched = job.fetched or Fetched()
    fetched_tokens = fetched.used_tokens(prefilled.cached_tokens)
    completed = PrefillCompleted(
        request=job.assign.request,
        attempt=job.assign.attempt,
        worker=job.worker,
        node_epoch=epoch_of(job.worker),
        computed_tokens=prefilled.computed_tokens,
        cached_own_tokens=prefilled.cached_tokens - fetched_tokens,
        cached_fetched_tokens=fetched_tokens,
        queue_us=prefilled.queue_us,
        prefill_us=prefilled.prefill_us,
        fetch_us=fetched.us,
        steps=prefilled.steps,
        predicted_us=prefilled.predicted_us,
        fetch_fallback=fetched.fallback,
        fetched_from=job.assign.fetch_from if fetched_tokens else None,
    )
    return [completed, *_cache_changes(state, job, prefilled.item, prefilled.evicted)]


def _cache_changes(state: State, job: Job, item: ItemResult, evicted: Sequence[BlockId]) -> list[EventData]:
    number = state.numbers.get(job.worker, 0)
    return changes(job.worker, state.incarnation, number, evicted, job.assign.request, item.stored)


def chunk_done(state: State, job: Job, item: ItemResult, evicted: Sequence[BlockId]) -> list[EventData]:
    """A running step has ended and the prompt has not: what is finished of it can be found as a prefix from now on."""
    return _cache_changes(state, job, item, evicted) if job.stage is Stage.RUNNING else []


def abort_job(job: Job, reason: AbortReason) -> list[EventData]:
    """A job ends without a first token."""
    if job.stage not in (Stage.QUEUED, Stage.RUNNING):
        return []
    return [
        PrefillAborted(request=job.assign.request, attempt=job.assign.attempt, worker=job.assign.worker, reason=reason)
    ]


def cut_short(
    state: State, job: Job, reason: AbortReason, item: ItemResult, evicted: Sequence[BlockId]
) -> list[EventData]:
    """A running step has come to its end without this job, which was cancelled; the blocks that were finished are kept."""
    if job.stage is not Stage.RUNNING:
        return []
    return [*abort_job(job, reason), *_cache_changes(state, job, item, evicted)]


def hand_off(job: Job, handed_off: HandedOff) -> list[EventData]:
    """The decode rank that the router chose has the prompt's KV."""
    assert job.assign.decode_worker is not None, "only a job with a decode worker is handed off"
    return [
        KvHandedOff(
            request=job.assign.request,
            attempt=job.assign.attempt,
            worker=job.worker,
            decode_worker=job.assign.decode_worker,
            bytes=handed_off.bytes,
            handoff_us=round(handed_off.seconds * US_PER_S),
        )
    ]
