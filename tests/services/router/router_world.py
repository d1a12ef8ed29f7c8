"""Builders for the router's tests: a small pool as a list of events, and a log to fold them from."""

import random
from itertools import count

from services.router.decider import Arrival, State, evolve, initial
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import (
    BlocksStored,
    CommittedWorker,
    EpochCommitted,
    NodeRegistered,
    PrefillCompleted,
    PrefillStarted,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, Source, TenantId, WorkerId, worker_id
from shared.model.cost import Coefficients
from shared.model.lattice import Composition, groups_of
from shared.runtime.clock import Ids

NOW_NS = 1_800_000_000 * 10**9
SECOND_NS = 10**9

ROUND = Coefficients(version="round", d=0.0, a=1e-3, b=1e-4, c=4e-3, alpha=0.0)
"""1,000 uncached tokens take 1 s + 4 s / C; 1,000 cached ones 0.1 s. Attention is free, so sums can be done by hand."""

BLOCK_TOKENS = 100

ME = Source("router-1-00000000")
OTHER = Source("router-2-00000000")
AGENT = Source("worker-1-00000000")


class _Clock:
    def now_ns(self) -> int:
        return NOW_NS

    def monotonic_ns(self) -> int:
        return NOW_NS

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps in a fold")


_ids = Ids(_Clock(), random.Random(1))


class Log:
    """Numbers events as a stream does: `store` folds nothing, `fold` folds."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or initial(ROUND)
        self.seq = 0
        self._source_seq: dict[Source, count[int]] = {}

    def event(self, source: Source, data: EventData, time_ns: int = NOW_NS) -> Envelope:
        number = next(self._source_seq.setdefault(source, count(1)))
        return Envelope(
            id=_ids.next(),
            type=data.TYPE,
            version=data.VERSION,
            pool="main",
            source=source,
            source_seq=number,
            time_ns=time_ns,
            data=data,
        )

    def store(self, envelope: Envelope) -> Stored:
        self.seq += 1
        return Stored("log", self.seq, envelope)

    def fold(self, *facts: EventData, source: Source = AGENT, time_ns: int = NOW_NS) -> None:
        for data in facts:
            evolve(self.state, self.store(self.event(source, data, time_ns)))


def registered(
    node: str = "n0",
    ranks: int = 8,
    *,
    incarnation: int = 1,
    epoch: int = 0,
    composition: Composition = (),
    decode_ranks: int = 1,
    blocks_per_rank: int = 1_000,
    prompt_tokens_max: int = 100_000,
    kv_layout: str = "cyclic",
    model: str = "toy",
    engine: str = "modelled",
    block_tokens: int = BLOCK_TOKENS,
    fetches: bool = False,
    chunk_tokens: int | None = None,
    kv_bytes_per_token: int = 1,
    decode_sequences: int = 0,
    hands_off: bool = False,
) -> NodeRegistered:
    return NodeRegistered.model_validate(
        {
            "node": node,
            "incarnation": incarnation,
            "engine": engine,
            "model": model,
            "model_revision": "1",
            "tokenizer_revision": "1",
            "dtype": "float32",
            "kv_layout": kv_layout,
            "block_tokens": block_tokens,
            "kv_bytes_per_token": kv_bytes_per_token,
            "fetches": fetches,
            "decode_sequences": decode_sequences,
            "hands_off": hands_off,
            "chunk_tokens": chunk_tokens,
            "prefill_ranks": ranks,
            "decode_ranks": decode_ranks,
            "degrees": (1, 2, 4, 8),
            "blocks_per_rank": blocks_per_rank,
            "prompt_tokens_max": prompt_tokens_max,
            "coefficients_version": "round",
            "epoch": epoch,
            "composition": composition,
        }
    )


def committed(composition: Composition, node: str = "n0", epoch: int = 1) -> EpochCommitted:
    name = NodeId(node)
    return EpochCommitted(
        node=name,
        epoch=epoch,
        composition=composition,
        workers=tuple(
            CommittedWorker(
                worker=worker_id(name, epoch, group.first_rank),
                first_rank=group.first_rank,
                degree=group.degree,
                capacity_us=1,
            )
            for group in groups_of(composition)
        ),
    )


def pool_of(*composition: int, node: str = "n0", **spec: object) -> list[EventData]:
    """One node that serves `composition` under epoch 1."""
    ranks = sum(composition)
    return [
        registered(node, ranks, epoch=1, composition=composition, **spec),  # type: ignore[arg-type]
        committed(composition, node),
    ]


def blocks(count_: int, salt: int = 0) -> tuple[BlockId, ...]:
    return tuple(BlockId(bytes([salt]) * 8 + number.to_bytes(8, "big")) for number in range(1, count_ + 1))


def arrival(request: str, tokens: int = 1_000, *, max_tokens: int = 10, salt: int = 0) -> Arrival:
    return Arrival(
        request=RequestId(request),
        tenant=TenantId("default"),
        model="toy",
        prompt_tokens=tokens,
        max_tokens=max_tokens,
        slo_us=1_000_000,
        stream=False,
        chain=blocks(tokens // BLOCK_TOKENS, salt),
    )


def started(request: str, worker: WorkerId, attempt: int = 1) -> PrefillStarted:
    return PrefillStarted(request=RequestId(request), attempt=attempt, worker=worker, queue_us=0)


def chunk(request: str, worker: WorkerId, done_tokens: int) -> BlocksStored:
    """The prompt is computed and stored up to here."""
    return BlocksStored(
        worker=worker,
        incarnation=1,
        number=1,
        cause="prefill",
        request=RequestId(request),
        first_depth=0,
        blocks=done_tokens // BLOCK_TOKENS,
    )


def prefilled(request: str, worker: WorkerId, attempt: int = 1, tokens: int = 1_000) -> PrefillCompleted:
    return PrefillCompleted(
        request=RequestId(request),
        attempt=attempt,
        worker=worker,
        node_epoch=1,
        computed_tokens=tokens,
        cached_own_tokens=0,
        queue_us=0,
        prefill_us=1,
    )
