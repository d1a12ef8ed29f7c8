"""The torch engine: one process per rank, the KV index here, tensors there. Implements `Engine`; see its rules.

This side has no torch in it. It decides which slots a prompt gets, tells the ranks, and believes what they answer.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.copy_plan import Copied, CopyPlan, Evicted, HandOffPlan, Pinned, Source
from services.worker.engine.kv_pool import KvPool, Reservation
from services.worker.engine.protocol import (
    Busy,
    EngineDescription,
    EngineDied,
    EngineError,
    HandedOff,
    Health,
    OutOfBlocks,
    PrefillStep,
    RankAdopted,
    Resident,
    Sampling,
    StaleEpoch,
    StepResult,
    Token,
)
from services.worker.engine.step_items import Reserved, cancel, fail, finish, reserve
from services.worker.engine.torch.checks import check_item, check_sampling, describe
from services.worker.engine.torch.copy_side import CopySide
from services.worker.engine.torch.decode_side import DecodeSide
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout
from services.worker.engine.torch.messages import Prefill
from services.worker.engine.torch.model_config import read_config
from services.worker.engine.torch.mover_side import MoverSide
from services.worker.engine.torch.parts import Parts, first_tokens
from services.worker.engine.torch.ranks import Ranks
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.switch import Switch
from services.worker.engine.torch.unbroken import to_the_end
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import BlockId, RequestId
from shared.model.lattice import Composition, Group

HAND_OFF_LIMIT_S = 30.0
"""Within a node: far beyond what the largest context takes at the copies' bandwidth, so that only what hangs runs into it."""


@dataclass(slots=True)
class _Step:
    """A step that runs. Requests that were cancelled meanwhile are released when it ends."""

    requests: frozenset[RequestId]
    cancelled: set[RequestId] = field(default_factory=set)


class TorchEngine:
    """See the module docstring and `Engine`. The zygote outlives the engine; whoever made it closes it."""

    def __init__(self, settings: TorchSettings, zygote: Zygote) -> None:
        """Reads the model's configuration. EngineError names what is missing or unsupported."""
        self._settings, self._zygote, self._numbers = settings, zygote, count(1)
        self._config = read_config(settings.model_dir)
        self._description = describe(settings, self._config)
        self._pool = KvPool(settings.prefill_ranks, settings.blocks_per_rank, settings.block_tokens)
        layout = KvLayout.of(self._config, settings.block_tokens, settings.blocks_per_rank)
        context_tokens = min(settings.context_tokens_max, self._config.positions_max)
        self._ranks = Ranks(settings, layout, context_tokens, self._numbers, self._on_loss)
        self._switch = Switch(self._ranks, self._pool, self._numbers, settings.switch_timeout_s)
        contexts = ContextLayout.of(layout, context_tokens, settings.sequences_per_decode_rank)
        model, new_name = f"{self._description.model}@{self._description.model_revision}", partial(secrets.token_hex, 8)
        self._mover_side = MoverSide(self._ranks, zygote, settings, contexts, model, self._numbers, new_name)
        self._decode_side = DecodeSide(self._ranks, self._mover_side, settings, context_tokens, self._numbers)
        self._copy_side = CopySide(self._pool, self._ranks, self._mover_side)
        self._parts = Parts(settings, layout, self._config.q_heads)
        self._started = False
        self._steps: dict[Group, _Step] = {}
        self._dead = asyncio.Event()

    # --- life

    async def start(self) -> None:
        """See `Engine.start`. Once per engine."""
        if self._started or self._ranks.lost is not None:
            raise EngineError("start: an engine starts once; make another")
        try:
            await self._ranks.start(self._zygote)
            if self._settings.decode_ranks:
                await self._mover_side.ready()
                self._mover_side.prepare()
        except BaseException:
            await self.close()
            raise
        self._started = True

    def describe(self) -> EngineDescription:
        """See `Engine.describe`."""
        return self._description

    def health(self) -> Health:
        """See `Engine.health`."""
        if self._ranks.lost is not None:
            return Health(False, 0, self._ranks.lost)
        alive = len(self._ranks.prefill) + len(self._ranks.decode)
        return Health(self._started, alive, "" if self._started else self._ranks.starting)

    async def wait_died(self) -> str:
        """See `Engine.wait_died`."""
        await self._dead.wait()
        return self._ranks.lost or ""

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._mover_side.close()
        await self._ranks.close()

    def _on_loss(self, reason: str) -> None:
        self._decode_side.fail(reason)
        self._dead.set()

    def _check_alive(self) -> None:
        if self._ranks.lost is not None:
            raise EngineDied(self._ranks.lost)
        if not self._started:
            raise EngineError("the engine has not been started")

    # --- geometry and prefill

    async def adopt(self, epoch: int, composition: Composition) -> tuple[RankAdopted, ...]:
        """See `Engine.adopt`."""
        self._check_alive()
        return await self._switch.adopt(epoch, composition, stepping=bool(self._steps))

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        """See `Engine.prefill`."""
        self._check_alive()
        if step.epoch != self._switch.epoch:
            raise StaleEpoch(f"epoch {step.epoch}: the engine serves {self._switch.epoch}")
        if self._switch.running or step.group in self._steps:
            raise Busy(f"group {step.group}: {'a switch' if self._switch.running else 'a step'} is running")
        for item in step.items:
            check_item(item, self._description, self._config.vocab)
        try:
            items = reserve(self._pool, step)
        except OutOfBlocks:
            self._copy_side.make_way(step.group)
            raise
        running = self._steps[step.group] = _Step(frozenset(item.request for item in step.items))
        try:
            return await to_the_end(self._run(step, items, running, noted))
        except asyncio.CancelledError:
            for item in step.items:
                self.cancel(item.request)
            raise

    async def _run(
        self,
        step: PrefillStep,
        items: Sequence[Reserved],
        running: _Step,
        noted: Callable[[StepResult], None] | None,
    ) -> StepResult:
        loop, start_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        try:
            tokens = await self._compute(step.group, items)
        except BaseException:
            fail(self._pool, items)
            for request in running.cancelled:
                self._pool.release(request)
            raise
        finally:
            del self._steps[step.group]
        results = tuple(
            cancel(self._pool, reserved, computed=True)
            if reserved.item.request in running.cancelled
            else finish(self._pool, reserved, tokens.get(number))
            for number, reserved in enumerate(items)
        )
        result = StepResult(results, loop.time() - start_s, self._pool.take_evicted(step.group))
        if noted is not None:
            noted(result)
        return result

    async def _compute(self, group: Group, items: Sequence[Reserved]) -> dict[int, Token]:
        """The first token of each item that ends its prompt, by its place in the step."""
        command = Prefill(
            next(self._numbers), self._switch.epoch, tuple(self._parts.of(group.degree, reserved) for reserved in items)
        )
        replies = await asyncio.gather(*(self._ranks.prefill[rank].ask(command) for rank in group.ranks))
        return first_tokens(replies, items)

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        """See `Engine.cached_blocks`."""
        return self._pool.cached_blocks(group, chain)

    def resident(self, group: Group) -> Resident:
        """See `Engine.resident`."""
        return self._pool.resident(group)

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        """See `Engine.take_evicted`."""
        return self._pool.take_evicted(group)

    # --- blocks that come from elsewhere, are lent, or go

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:
        """See `Engine.pin`."""
        self._check_alive()
        return await self._copy_side.pin(lease, blocks)

    def unpin(self, lease: str) -> None:
        """See `Engine.unpin`."""
        self._copy_side.unpin(lease)

    async def copy_blocks(self, plan: CopyPlan, noted: Callable[[Copied], None] | None = None) -> Copied:
        """See `Engine.copy_blocks`."""
        self._check_alive()
        if plan.epoch != self._switch.epoch:
            raise StaleEpoch(f"epoch {plan.epoch}: the engine serves {self._switch.epoch}")
        return await self._copy_side.copy(plan, noted)

    async def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        """See `Engine.evict`."""
        self._check_alive()
        return self._pool.evict(group, blocks)

    # --- the decode side, and the end of a request

    async def offer(self, request: RequestId) -> Pinned:
        """See `Engine.offer`."""
        self._check_alive()
        return await self._copy_side.offer(request, lambda: self._finished(request))

    async def hand_off(self, request: RequestId, plan: HandOffPlan | None = None) -> HandedOff:
        """See `Engine.hand_off`."""
        self._check_alive()
        if plan is None and (finished := self._finished(request)) is not None:
            plan = HandOffPlan(finished.prompt_tokens, tuple(map(Source, finished.slots)), HAND_OFF_LIMIT_S)
        return await self._decode_side.hand_off(request, plan)

    def _finished(self, request: RequestId) -> Reservation | None:
        return self._pool.finished(request) if self._running(request) is None else None

    def decode(
        self,
        request: RequestId,
        first_token: int,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling,
        past: Past = NO_PAST,
    ) -> AsyncGenerator[Token, None]:
        """See `Engine.decode`. The end of the model's context ends the sequence as well."""
        self._check_alive()
        check_sampling(sampling, self._config.vocab, past)
        if not 0 <= first_token < self._config.vocab:
            raise EngineError(f"first_token: {first_token} is outside the vocabulary of {self._config.vocab}")
        return self._decode_side.decode(request, first_token, max_new_tokens, stop_tokens, sampling, past)

    def release(self, request: RequestId) -> None:
        """See `Engine.release`. While a step or a hand-off uses the blocks, it takes effect when that ends."""
        running, reading = self._running(request), self._decode_side.reading(request)
        if running is not None:
            running.cancelled.add(request)
        elif reading is not None:
            reading.add_done_callback(lambda _: self._pool.release(request))
        else:
            self._pool.release(request)
        self._copy_side.withdraw(request)

    def cancel(self, request: RequestId) -> None:
        """See `Engine.cancel`. Ends its decoding as well."""
        self._decode_side.end(request)
        self.release(request)

    def _running(self, request: RequestId) -> _Step | None:
        return next((step for step in self._steps.values() if request in step.requests), None)
