"""A made-up pool's events in a realistic mix, without the pool: what the ledger is measured and tested with.

One node of eight ranks with four workers; each request is received, assigned, prefilled and completed, its blocks are
stored, older ones evicted; every so often one is redirected, cancelled or rejected, and a window closes. 8.3 events per
request, 2.4 kB each.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    CommittedWorker,
    EpochCommitted,
    KvHandedOff,
    NodeRegistered,
    PrefillCompleted,
    PrefillStarted,
    PricedCandidate,
    RankAdoptedEpoch,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestReceived,
    RequestRedirected,
    RequestRejected,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RequestId, TenantId, WorkerId, worker_id
from shared.model.lattice import groups_of

NODE = NodeId("n0")
COMPOSITION = (1, 1, 2, 4)
BLOCK_TOKENS = 64
BLOCKS_KEPT_MAX = 20_000
WINDOW_REQUESTS = 200

PROMPT_TOKENS = (512, 2_048, 8_192, 16_384)
REAL_PROMPT_TOKENS = (2_048, 8_192, 16_384, 21_504)
"""188 blocks in the mean, as recorded agents and conversations had them."""


class Told(NamedTuple):
    """One fact, who says it and what it belongs to. `sender` is one of `SENDERS`."""

    sender: str
    fact: EventData
    correlation: str | None = None


SENDERS = ("router", "worker", "controller")


class Traffic:
    """The events of the pool, from its start on; equal seeds tell equal stories. `name` keeps requests apart; each is as long
    as one of `prompts`."""

    def __init__(self, seed: int, name: str = "r", prompts: Sequence[int] = PROMPT_TOKENS) -> None:
        self._chance = random.Random(seed)
        self._name = name
        self._prompts = prompts
        self._requests = 0
        self._numbers: dict[WorkerId, int] = {}
        self._kept: dict[WorkerId, deque[tuple[bytes, int]]] = {}
        self._workers = [(worker_id(NODE, 1, group.first_rank), group) for group in groups_of(COMPOSITION)]

    def start(self) -> list[Told]:
        """The node registers and gets its first epoch."""
        registered = NodeRegistered(
            node=NODE,
            incarnation=1,
            engine="modelled",
            model="made-up",
            model_revision="1",
            tokenizer_revision="1",
            dtype="bfloat16",
            kv_layout="cyclic",
            block_tokens=BLOCK_TOKENS,
            kv_bytes_per_token=1,
            prefill_ranks=sum(COMPOSITION),
            decode_ranks=1,
            degrees=(1, 2, 4, 8),
            blocks_per_rank=BLOCKS_KEPT_MAX,
            prompt_tokens_max=131_072,
            coefficients_version="c1",
        )
        adopted = [RankAdoptedEpoch(node=NODE, incarnation=1, rank=rank, epoch=1, switch_us=9) for rank in range(8)]
        workers = tuple(
            CommittedWorker(worker=worker, first_rank=group.first_rank, degree=group.degree, capacity_us=10**7)
            for worker, group in self._workers
        )
        committed = EpochCommitted(node=NODE, epoch=1, composition=COMPOSITION, workers=workers)
        return [Told("worker", registered), *(Told("worker", each) for each in adopted), Told("controller", committed)]

    def request(self) -> Iterator[Told]:
        """The next request's events, from its receipt to its end."""
        self._requests += 1
        request = RequestId(f"{self._name}-{self._requests}")
        prompt_tokens = self._chance.choice(self._prompts)
        block_ids = self._chance.randbytes(16 * (prompt_tokens // BLOCK_TOKENS))
        for sender, fact in self._life(request, prompt_tokens, block_ids):
            yield Told(sender, fact, request)
        if self._requests % WINDOW_REQUESTS == 0:
            yield Told("controller", self.window(self._requests // WINDOW_REQUESTS))

    def _life(self, request: RequestId, prompt_tokens: int, block_ids: bytes) -> Iterator[tuple[str, EventData]]:
        yield "router", self._received(request, prompt_tokens, block_ids)
        fate = self._chance.random()
        if fate < 0.02:
            yield "router", RequestRejected(request=request, reason="overloaded", retry_after_s=1)
            return
        worker, _ = self._chance.choice(self._workers)
        attempt = 1
        yield "router", self._assigned(request, attempt, worker, prompt_tokens)
        if fate < 0.07:
            yield "router", RequestRedirected(request=request, attempt=attempt, worker=worker, reason="full")
            worker, _ = self._chance.choice(self._workers)
            attempt = 2
            yield "router", self._assigned(request, attempt, worker, prompt_tokens)
        if 0.07 <= fate < 0.09:
            yield "router", RequestCancelled(request=request)
            return
        place = {"request": request, "attempt": attempt, "worker": worker}
        yield "worker", PrefillStarted(**place, queue_us=1_000)
        yield (
            "worker",
            PrefillCompleted(
                **place,
                node_epoch=1,
                computed_tokens=prompt_tokens,
                cached_own_tokens=0,
                queue_us=1_000,
                prefill_us=80_000,
            ),
        )
        yield "worker", self._stored(request, worker, len(block_ids) // 16, block_ids)
        if evicted := self._evicted(worker):
            yield "worker", evicted
        yield "worker", KvHandedOff(**place, decode_worker=WorkerId("n0/decode/0"), bytes=prompt_tokens, handoff_us=900)
        yield "router", self._completed(request, worker)

    def _received(self, request: RequestId, prompt_tokens: int, block_ids: bytes) -> RequestReceived:
        return RequestReceived(
            request=request,
            tenant=TenantId("t1"),
            model="made-up",
            prompt_tokens=prompt_tokens,
            max_tokens=128,
            slo_us=2_000_000,
            stream=True,
            block_ids=block_ids,
            seen_seq=self._requests,
        )

    def _assigned(self, request: RequestId, attempt: int, worker: WorkerId, prompt_tokens: int) -> RequestAssigned:
        candidates = tuple(
            PricedCandidate(
                worker=each,
                degree=group.degree,
                cached_tokens=0,
                queue_us=1_000,
                service_us=90_000,
                occupancy_us=9_000,
                price_us=280_000 + group.first_rank,
            )
            for each, group in self._workers
        )
        return RequestAssigned(
            request=request,
            attempt=attempt,
            worker=worker,
            degree=1,
            policy="paper",
            uncached_tokens=prompt_tokens,
            cached_tokens=0,
            service_us=90_000,
            queue_us=1_000,
            beta=3.0,
            lam=0.1,
            preferred_degree=1,
            candidates=candidates,
            price_digest=f"{self._requests:032x}",
            parameters_version=1,
            coefficients_version="c1",
            seen_seq=self._requests,
            now_ns=1_800_000_000 * 10**9,
        )

    def _stored(self, request: RequestId, worker: WorkerId, blocks: int, block_ids: bytes) -> BlocksStored:
        self._kept.setdefault(worker, deque()).append((block_ids, blocks))
        number = self._next_number(worker)
        return BlocksStored(
            worker=worker, incarnation=1, number=number, cause="prefill", request=request, blocks=blocks
        )

    def _evicted(self, worker: WorkerId) -> BlocksEvicted | None:
        kept = self._kept[worker]
        if sum(blocks for _, blocks in kept) <= BLOCKS_KEPT_MAX:
            return None
        block_ids, _ = kept.popleft()
        children_first = b"".join(block_ids[at : at + 16] for at in range(len(block_ids) - 16, -1, -16))
        return BlocksEvicted(
            worker=worker, incarnation=1, number=self._next_number(worker), cause="pressure", block_ids=children_first
        )

    def _next_number(self, worker: WorkerId) -> int:
        self._numbers[worker] = self._numbers.get(worker, 0) + 1
        return self._numbers[worker]

    def _completed(self, request: RequestId, worker: WorkerId) -> RequestCompleted:
        return RequestCompleted(
            request=request,
            worker=worker,
            ttft_us=95_000,
            queue_us=1_000,
            prefill_us=80_000,
            handoff_us=14_000,
            tpot_us=12_000,
            output_tokens=64,
            cached_tokens=0,
            finish="stop",
        )

    def window(self, k: int) -> WindowClosed:
        """An observation window."""
        return WindowClosed(
            k=k,
            from_seq=k,
            to_seq=k + 1,
            length_us=20_000_000,
            requests=WINDOW_REQUESTS,
            completed=WINDOW_REQUESTS,
            prompt_tokens=10**6,
            demand_us=10**7,
            long_tokens=32_768,
            long_request_share=0.0,
            long_token_share=0.0,
            capacity_us=10**8,
            attainment=1.0,
            hit_rate=0.0,
        )
