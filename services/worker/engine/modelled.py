"""An engine without tensors: time passes as the cost model says, and blocks are counted in a real `KvPool`.

It stands for any number of GPUs on one machine, in real time or in a simulator's. Nothing in it fails by itself: a node's
death is its `close`. What it generates is a function of every token before the new one (and of the seed, if sampling is
asked for), so a request that continues elsewhere, from its prompt and what it had generated, gets the same tokens.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.copy_plan import Copied, CopyPlan, Evicted, HandOffPlan, Pinned, Source
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.modelled_copies import LATENCY_S, ModelledCopies
from services.worker.engine.modelled_decode import DECODE_SEQUENCES, ModelledDecode
from services.worker.engine.modelled_step import RunningStep
from services.worker.engine.protocol import (
    Busy,
    EngineDescription,
    EngineDied,
    EngineError,
    HandedOff,
    Health,
    ItemResult,
    OutOfBlocks,
    PrefillStep,
    RankAdopted,
    Resident,
    Sampling,
    StaleEpoch,
    StepResult,
    Token,
)
from services.worker.engine.step_items import Reserved, cancel, finish, reserve
from shared.contracts.ids import BlockId, RequestId
from shared.model.cost import US_PER_S, Coefficients
from shared.model.lattice import DEGREES, Composition, Group
from shared.runtime.clock import Clock

ADOPT_S = 0.02
"""Barrier and group switch; the torch engine's barrier over eight ranks takes about as long."""

NOISE_MIN = 0.1
"""A step takes at least this share of its modelled time, however the noise falls."""


@dataclass(frozen=True, slots=True)
class ModelledNode:
    """The machine that an engine stands for. Every modelled second takes 1/`speedup` seconds of the clock."""

    model: str
    model_revision: str
    tokenizer_revision: str
    vocabulary: int
    prefill_ranks: int
    decode_ranks: int
    block_tokens: int
    blocks_per_rank: int
    context_tokens_max: int
    kv_bytes_per_token: int
    coefficients: Coefficients
    tpot_s: float
    link_bytes_per_s: float
    speedup: float = 1.0
    noise_sd: float = 0.0
    straggler: float = 1.0


class ModelledEngine:
    """See `protocol.Engine` for the rules. `chance` is the noise of the step times and nothing else."""

    def __init__(self, node: ModelledNode, clock: Clock, chance: random.Random) -> None:
        self._node = node
        self._clock = clock
        self._chance = chance
        self._pool = KvPool(node.prefill_ranks, node.blocks_per_rank, node.block_tokens)
        block_bytes = node.block_tokens * node.kv_bytes_per_token
        access = f"{node.model}@{node.model_revision}/{node.block_tokens}".encode()
        block_s = block_bytes / node.link_bytes_per_s / node.speedup
        latency_s = LATENCY_S / node.speedup
        self._dead = asyncio.Event()
        self._copies = ModelledCopies(self._pool, access, block_bytes, block_s, latency_s, clock, self._dead)
        self._decode = ModelledDecode(
            ranks=node.decode_ranks,
            vocabulary=node.vocabulary,
            access=access,
            token_bytes=node.kv_bytes_per_token,
            bytes_per_s=node.link_bytes_per_s * node.speedup,
            tpot_s=node.tpot_s / node.speedup,
            sleep=self._sleep,
        )
        self._epoch = 0
        self._composition: Composition = ()
        self._adopting = False
        self._started = False
        self._running: dict[Group, RunningStep] = {}

    def lose_copies(self, lost: bool) -> None:
        """Whether sources of copies go away half-way from now on: for those who want to see what becomes of it."""
        self._copies.lost = lost

    async def start(self) -> None:
        self._started = True
        self._check_alive()

    def describe(self) -> EngineDescription:
        node = self._node
        degrees = tuple(degree for degree in DEGREES if degree <= node.prefill_ranks)
        return EngineDescription(
            engine="modelled",
            model=node.model,
            model_revision=node.model_revision,
            tokenizer_revision=node.tokenizer_revision,
            dtype="bfloat16",
            kv_layout="cyclic",
            block_tokens=node.block_tokens,
            prefill_ranks=node.prefill_ranks,
            decode_ranks=node.decode_ranks,
            degrees=degrees,
            blocks_per_rank=node.blocks_per_rank,
            prompt_tokens_max=min(node.context_tokens_max - 1, degrees[-1] * node.blocks_per_rank * node.block_tokens),
            kv_bytes_per_token=node.kv_bytes_per_token,
            device="modelled",
            decode_sequences=DECODE_SEQUENCES if node.decode_ranks else 0,
            lends=True,
        )

    async def adopt(self, epoch: int, composition: Composition) -> tuple[RankAdopted, ...]:
        self._check_alive()
        if epoch < self._epoch:
            raise StaleEpoch(f"adopt: epoch {epoch} is older than {self._epoch}, which is served")
        if self._running or self._adopting:
            raise Busy(f"adopt: {len(self._running)} steps run")
        if epoch == self._epoch and composition != self._composition:
            raise ValueError(f"composition {composition}: epoch {epoch} is served as {self._composition}")
        seconds = 0.0
        if epoch > self._epoch:
            self._pool.adopt(composition)
            self._epoch, self._composition = epoch, composition
            seconds = ADOPT_S / self._node.speedup
            self._adopting = True
            try:
                await self._sleep(seconds)
            finally:
                self._adopting = False
        return tuple(RankAdopted(rank, seconds) for rank in range(self._node.prefill_ranks))

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        self._check_alive()
        if step.epoch != self._epoch:
            raise StaleEpoch(f"prefill: epoch {step.epoch} is not {self._epoch}, which is served")
        if self._adopting or step.group in self._running:
            raise Busy(f"prefill: the worker at rank {step.group.first_rank} runs a step or adopts")
        running = RunningStep(frozenset(item.request for item in step.items))
        began_ns = self._clock.monotonic_ns()
        try:
            items = reserve(self._pool, step)
        except OutOfBlocks:
            self._copies.make_way(step.group)
            raise
        self._running[step.group] = running
        try:
            await running.run(self._clock, self._step_s(step.group.degree, items), self._dead)
            self._check_alive()
        except BaseException:
            for item in step.items:
                self.release(item.request)
            raise
        finally:
            del self._running[step.group]
        results = tuple(
            cancel(self._pool, reserved, computed=not running.broken_off)
            if reserved.item.request in running.cancelled
            else self._finish(reserved)
            for reserved in items
        )
        seconds = (self._clock.monotonic_ns() - began_ns) / 1e9
        result = StepResult(results, seconds, self._pool.take_evicted(step.group))
        if noted is not None:
            noted(result)
        return result

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        return self._pool.cached_blocks(group, chain)

    def resident(self, group: Group) -> Resident:
        return self._pool.resident(group)

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        return self._pool.take_evicted(group)

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        self._check_alive()
        return self._copies.pin(lease, blocks)

    def unpin(self, lease: str) -> None:
        self._pool.copies.end_lease(lease)

    async def copy_blocks(self, plan: CopyPlan, noted: Callable[[Copied], None] | None = None) -> Copied:
        self._check_alive()
        if plan.epoch != self._epoch:
            raise StaleEpoch(f"copy_blocks: epoch {plan.epoch} is not {self._epoch}, which is served")
        copied = await self._copies.copy(plan)
        if noted is not None:
            noted(copied)
        return copied

    async def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        self._check_alive()
        return self._pool.evict(group, blocks)

    async def offer(self, request: RequestId) -> Pinned:
        self._check_alive()
        access, reservation = self._decode.access(request), self._pool.finished(request)
        if access is None or reservation is None:
            raise EngineError(f"offer: request {request} has no finished prefill here")
        return Pinned(tuple(map(Source, reservation.slots)), access)

    async def hand_off(self, request: RequestId, plan: HandOffPlan | None = None) -> HandedOff:
        self._check_alive()
        return await self._decode.hand_off(request, plan)

    def decode(
        self,
        request: RequestId,
        first_token: int,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling,
        past: Past = NO_PAST,  # noqa: ARG002 - what it says is a function of all that was said anyway
    ) -> AsyncGenerator[Token, None]:
        self._check_alive()
        return self._decode.decode(request, first_token, max_new_tokens, stop_tokens, sampling)

    def release(self, request: RequestId) -> None:
        self._pool.release(request)
        self._decode.release(request)

    def cancel(self, request: RequestId) -> None:
        for step in self._running.values():
            if request in step.requests:
                step.cancel(request)
                return
        self.release(request)
        self._decode.end(request)

    def health(self) -> Health:
        if self._dead.is_set():
            return Health(ok=False, ranks_alive=0, detail="closed")
        ranks = self._node.prefill_ranks + self._node.decode_ranks
        return Health(ok=self._started, ranks_alive=ranks if self._started else 0)

    async def wait_died(self) -> str:
        await self._dead.wait()
        return "the modelled engine was closed"

    async def close(self) -> None:
        self._dead.set()

    def check(self) -> None:
        """Assert the pool's own rules, and that whatever is pinned is running or finished. For tests and simulation."""
        self._pool.check()

    def _check_alive(self) -> None:
        if self._dead.is_set():
            raise EngineDied("the modelled engine was closed")
        if not self._started:
            raise EngineError("the modelled engine was not started")

    def _step_s(self, degree: int, items: Sequence[Reserved]) -> float:
        """Seconds of the clock. A packed step pays the constant d + g(C-1) once (model, 2.1)."""
        costs = self._node.coefficients
        shares_us = [costs.adds_us(degree, each.end_tokens - each.cached_tokens, each.cached_tokens) for each in items]
        noise = max(NOISE_MIN, self._chance.gauss(1.0, self._node.noise_sd))
        seconds = (costs.constant_us(degree) + sum(shares_us)) / US_PER_S
        return seconds * noise * self._node.straggler / self._node.speedup

    def _finish(self, reserved: Reserved) -> ItemResult:
        if not reserved.ends_prompt:
            return finish(self._pool, reserved, None)
        item = reserved.item
        return finish(self._pool, reserved, self._decode.prefilled(item.request, item.tokens, item.sampling))

    async def _sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._check_alive()
