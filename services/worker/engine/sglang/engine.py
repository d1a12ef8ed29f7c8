"""SGLang servers as an engine: see `protocol.Engine` for the rules, and `docs/sglang.md` for what an operator does.

Where SGLang differs from an engine of our own, and what the rules become:

1.  It schedules by itself. A step is its requests sent together; a prompt in chunks is a prefill of each longer prefix, which
    finds the one before in the cache. Nothing is pinned: a prefix that is pushed out between two chunks is computed again.
2.  It queues what finds no room instead of refusing it, so no step ends with `OutOfBlocks`.
3.  Its cache changes by itself. KV events and finished prefills say what a unit holds (`unit_cache`), and the agent is told in
    order, with results or when it asks (`cache_index`).
4.  A copy is a prefill of the prefix (`recompute`).
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.copy_plan import Copied, CopyPlan, Evicted, HandOffPlan, Pinned
from services.worker.engine.protocol import (
    Busy,
    EngineDescription,
    EngineError,
    HandedOff,
    Health,
    PrefillStep,
    RankAdopted,
    Resident,
    Sampling,
    StaleEpoch,
    StepResult,
    Token,
)
from services.worker.engine.sglang.adaptive import AdaptiveGeometry
from services.worker.engine.sglang.cache_index import CacheIndex
from services.worker.engine.sglang.copies import Copies
from services.worker.engine.sglang.decoding import Decoding
from services.worker.engine.sglang.fleet import Fleet
from services.worker.engine.sglang.generations import Generations
from services.worker.engine.sglang.geometry import FixedGeometry, Geometry
from services.worker.engine.sglang.model_facts import read_model
from services.worker.engine.sglang.prefills import Prefills
from services.worker.engine.sglang.settings import SglangSettings
from services.worker.engine.step_items import check_items
from services.worker.engine.torch.checks import check_item
from services.worker.engine.torch.model_config import model_revision, tokenizer_revision
from shared.contracts.ids import BlockId, RequestId
from shared.model.lattice import Composition, Group, groups_of
from shared.runtime.clock import Clock


class SglangEngine:
    """`chance` draws bootstrap rooms and the names of requests."""

    def __init__(self, settings: SglangSettings, clock: Clock, chance: random.Random) -> None:
        self._settings, self._clock = settings, clock
        self._model = read_model(settings.model_dir)
        self._description = self._describe()
        self._changed = asyncio.Condition()
        self._fleet = Fleet(settings, self._model, clock, self._wake, self._lose_decode)
        self._geometry: Geometry = (
            AdaptiveGeometry(self._fleet, settings, clock, self._changed)
            if settings.adaptive
            else FixedGeometry(settings)
        )
        self._index = CacheIndex(self._fleet.units, settings.blocks_per_rank)
        generations = Generations(self._fleet, settings, chance)
        self._decoding = Decoding(self._fleet, generations, clock, self._model.kv_bytes_per_token)
        self._prefills = Prefills(self._fleet, self._index, generations, self._decoding, clock, settings.block_tokens)
        self._copies = Copies(self._index, self._geometry, clock, self._changed, self._prefills.compute)
        self._epoch = 0
        self._composition: Composition = ()
        self._adopting = self._started = False

    # --- life

    async def start(self) -> None:
        """See `Engine.start`."""
        try:
            await self._fleet.start()
            await self._geometry.start()
        except BaseException:
            await self.close()
            raise
        self._started = True

    def describe(self) -> EngineDescription:
        """See `Engine.describe`."""
        return self._description

    def _describe(self) -> EngineDescription:
        settings, model = self._settings, self._model
        return EngineDescription(
            engine="sglang",
            model=settings.model_dir.name,
            model_revision=model_revision(settings.model_dir),
            tokenizer_revision=tokenizer_revision(settings.model_dir),
            dtype=model.dtype,
            kv_layout="replicated",
            block_tokens=settings.block_tokens,
            prefill_ranks=settings.prefill_ranks,
            decode_ranks=len(settings.decode) or 1,
            degrees=settings.degrees,
            blocks_per_rank=settings.blocks_per_rank,
            prompt_tokens_max=settings.prompt_tokens_max(model),
            kv_bytes_per_token=model.kv_bytes_per_token,
            device="sglang",
            moves_kv=False,
            evicts=settings.adaptive,
        )

    def health(self) -> Health:
        """See `Engine.health`."""
        if self._fleet.lost.done():
            return Health(False, 0, self._fleet.lost.result())
        ranks = self._description.prefill_ranks + self._description.decode_ranks - sum(self._fleet.down)
        return Health(self._started, ranks if self._started else 0, self._fleet.starting)

    async def wait_died(self) -> str:
        """See `Engine.wait_died`."""
        return await asyncio.shield(self._fleet.lost)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._fleet.lose("the engine was closed")
        self._prefills.close()
        self._decoding.close(self._fleet.lost.result())
        await self._fleet.close()

    def _check_alive(self) -> None:
        self._fleet.check()
        if not self._started:
            raise EngineError("the engine has not been started")

    def _wake(self) -> None:
        self._fleet.spawn(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _lose_decode(self, rank: int, reason: str) -> None:
        self._prefills.lose_rank(rank, reason)
        self._decoding.lose_rank(rank, reason)

    # --- geometry

    async def adopt(self, epoch: int, composition: Composition) -> tuple[RankAdopted, ...]:
        """See `Engine.adopt`."""
        self._check_alive()
        if epoch < self._epoch:
            raise StaleEpoch(f"adopt: epoch {epoch} is older than {self._epoch}, which is served")
        groups = groups_of(composition)
        if sum(composition) != self._settings.prefill_ranks:
            raise ValueError(
                f"composition {composition}: covers {sum(composition)} of {self._settings.prefill_ranks} ranks"
            )
        if epoch == self._epoch and composition != self._composition:
            raise ValueError(f"composition {composition}: epoch {epoch} is served as {self._composition}")
        if self._prefills.running or self._adopting:
            raise Busy(f"adopt: {len(self._prefills.running)} steps run")
        self._adopting = True
        try:
            ranks = await self._geometry.adopt(composition)
        finally:
            self._adopting = False
        if epoch > self._epoch:
            self._epoch, self._composition = epoch, composition
            self._index.adopt(groups)
        return ranks

    # --- prefill

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        """See `Engine.prefill`."""
        self._check_alive()
        if step.epoch != self._epoch:
            raise StaleEpoch(f"prefill: epoch {step.epoch} is not {self._epoch}, which is served")
        self._index.worker(step.group)
        if self._adopting or step.group in self._prefills.running:
            raise Busy(f"prefill: the worker at rank {step.group.first_rank} runs a step or adopts")
        check_items(step, self._settings.block_tokens)
        for item in step.items:
            # SGLang 0.5.23 does not look at token ids: one outside the vocabulary ends the whole server.
            check_item(item, self._description, self._model.vocabulary)
        result = await self._prefills.run(step)
        if noted is not None:
            noted(result)
        return result

    # --- what workers hold

    def cached_blocks(self, group: Group, chain: Sequence[BlockId]) -> int:
        """See `Engine.cached_blocks`."""
        return self._index.cached_blocks(group, chain)

    def resident(self, group: Group) -> Resident:
        """See `Engine.resident`."""
        return self._index.resident(group)

    def take_evicted(self, group: Group) -> tuple[BlockId, ...]:
        """See `Engine.take_evicted`."""
        return self._index.take_evicted(group)

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> Pinned:  # noqa: ARG002
        """See `Engine.pin`: the tokens of the blocks, for who computes them anew. Nothing is kept for it."""
        self._check_alive()
        return self._copies.promise(blocks)

    def unpin(self, lease: str) -> None:
        """Nothing was pinned."""

    async def copy_blocks(self, plan: CopyPlan, noted: Callable[[Copied], None] | None = None) -> Copied:
        """See `Engine.copy_blocks`."""
        self._check_alive()
        if plan.epoch != self._epoch:
            raise StaleEpoch(f"copy_blocks: epoch {plan.epoch} is not {self._epoch}, which is served")
        self._index.worker(plan.group)
        copied = await self._copies.carry_out(plan, lambda: self._epoch)
        if noted is not None:
            noted(copied)
        return copied

    async def evict(self, group: Group, blocks: Sequence[BlockId]) -> Evicted:
        """See `Engine.evict`."""
        self._check_alive()
        self._index.worker(group)
        if not blocks:
            return Evicted((), (), self._index.take_evicted(group))
        return await self._copies.evict(group, blocks)

    # --- after the prefill

    async def offer(self, request: RequestId) -> Pinned:
        """See `Engine.offer`. SGLang's servers hand off among themselves, as the prefill's `then` has told them."""
        raise EngineError(f"offer: request {request}: SGLang's KV is read by its own servers alone")

    async def hand_off(self, request: RequestId, plan: HandOffPlan | None = None) -> HandedOff:
        """See `Engine.hand_off`. EngineError for what another node offers."""
        self._check_alive()
        if plan is not None:
            raise EngineError(f"hand_off: request {request}: SGLang's servers read no other node's KV by a plan")
        return await self._decoding.hand_off(request)

    def decode(
        self,
        request: RequestId,
        first_token: int,  # noqa: ARG002 - the prefill's `then` has said what follows, and how it is chosen
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling,  # noqa: ARG002
        past: Past = NO_PAST,  # noqa: ARG002
    ) -> AsyncGenerator[Token, None]:
        """See `Engine.decode`."""
        self._check_alive()
        return self._decoding.tokens(request, max_new_tokens, stop_tokens)

    def release(self, request: RequestId) -> None:
        """See `Engine.release`. What is being decoded goes on."""
        self._decoding.release(request)

    def cancel(self, request: RequestId) -> None:
        """See `Engine.cancel`."""
        if not self._prefills.cancel(request):
            self._decoding.drop(request)
