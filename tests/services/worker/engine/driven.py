"""An engine that does everything at once, and a record of it, kept as an agent keeps its own: whatever is noted, in order.

`check` compares the record with what the engine's index says, at any moment."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from services.worker.engine.copy_plan import Copied, CopyPlan, Pinned, Source
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import EngineError, PrefillItem, PrefillStep, StepResult
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.engine import TorchEngine
from shared.contracts.ids import BlockId, NodeId, RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.lattice import Composition, Group, groups_of

COMPOSITIONS: list[Composition] = [(4,), (2, 2), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1)]
ELSEWHERE = NodeId("elsewhere")
COPY_LIMIT_S = 30.0
WAITS_MAX = 60_000
"""A minute of real time, and far more of modelled time than anything takes."""


class Driven:
    """Every action begins something and returns; what it began goes on meanwhile, until `settle`."""

    def __init__(self, engine: ModelledEngine | TorchEngine) -> None:
        self.engine = engine
        self._modelled = isinstance(engine, ModelledEngine)
        self.pool, self.block_tokens = engine._pool, engine.describe().block_tokens
        self.groups: tuple[Group, ...] = ()
        self.told: dict[Group, dict[BlockId, BlockId | None]] = {}
        self.first_tokens: dict[str, set[int]] = {}
        self.outcomes: set[str] = set()
        self.unfinished: dict[RequestId, tuple[Group, str]] = {}
        self.running: list[RequestId] = []
        self.holding: list[RequestId] = []
        self.lent: dict[str, Pinned] = {}
        self._epoch = 0
        self._names = count()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- prompts: a block for each letter, and a token more

    def tokens(self, text: str) -> Tokens:
        letters = [np.full(self.block_tokens, ord(letter) % 50, dtype=np.uint32) for letter in text]
        return np.concatenate([*letters, np.array([7], dtype=np.uint32)])

    def chain(self, text: str) -> list[BlockId]:
        return block_chain(self.tokens(text), self.block_tokens, b"k" * 32)

    # --- actions

    def step(self, worker: int, texts: Sequence[str], until: int | None = None) -> None:
        """A step of new prompts; with `until`, the first of them is cut after so many blocks."""
        requests = {RequestId(f"r{next(self._names)}"): text for text in texts}
        self._spawn(self._step(self._group(worker), requests, until))

    def resume(self, number: int) -> None:
        """The last step of a prompt that was cut."""
        if self.unfinished:
            request, (group, text) = list(self.unfinished.items())[number % len(self.unfinished)]
            self._spawn(self._step(group, {request: text}, None))

    def cancel(self, number: int) -> None:
        """Some request, whatever it does."""
        known = [*self.running, *self.running, *self.holding, *self.unfinished, RequestId("unknown")]
        request = known[number % len(known)]
        self.unfinished.pop(request, None)
        self.engine.cancel(request)

    def release(self, number: int) -> None:
        if self.holding:
            self.engine.release(self.holding.pop(number % len(self.holding)))

    def copy(self, worker: int, text: str, *, own: bool) -> None:
        """Bring a path from this node's own slots, or from those of another node, if there is one."""
        self._spawn(self._copy(self._group(worker), text, own))

    def lend(self, text: str) -> None:
        self._spawn(self._lend(f"l{next(self._names)}", text))

    def unpin(self, number: int) -> None:
        if self.lent:
            lease = list(self.lent)[number % len(self.lent)]
            del self.lent[lease]
            self.engine.unpin(lease)

    async def evict(self, worker: int, text: str, below: int) -> None:
        group = self._group(worker)
        gone = await self.engine.evict(group, self.chain(text)[below:])
        self._leave(group, (*gone.evicted, *gone.freed))

    async def adopt(self, composition: Composition) -> None:
        """As soon as the steps that run have ended, as an agent sees to."""
        await self._until(lambda: not (self.engine._running if self._modelled else self.engine._steps))
        self._epoch += 1
        self.unfinished.clear()  # their pins are dropped
        switch = asyncio.ensure_future(self.engine.adopt(self._epoch, composition))
        await self._until(switch.done)
        switch.result()
        self.groups = groups_of(composition)
        self.told = {group: self._resident(group) for group in self.groups}

    async def pass_time(self) -> None:
        """Until something that was begun may have ended."""
        await asyncio.sleep(0.001)

    async def _until(self, holds: Callable[[], bool]) -> None:
        for _ in range(WAITS_MAX):
            if holds():
                return
            await self.pass_time()
        raise AssertionError("something that was begun does not end")

    async def one_ends(self) -> None:
        """Something that was begun, if there is any."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def settle(self) -> None:
        """Everything that was begun ends, and everything that is held is let go."""
        await self._until(lambda: not self._tasks)
        for request in (*self.unfinished, *self.holding):
            self.engine.release(request)
        for lease in self.lent:
            self.engine.unpin(lease)
        self.unfinished, self.holding, self.lent = {}, [], {}
        self.check()
        pinned = [self.pool.counts(rank)[2] for rank in range(4)]
        assert pinned == [0] * 4, f"nobody needs anything, but {pinned} slots are pinned"

    # --- what they begin

    def _group(self, worker: int) -> Group:
        return self.groups[worker % len(self.groups)]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = task.exception()
        if isinstance(error, EngineError):
            self.outcomes.add(type(error).__name__)
        elif error is not None:
            raise error

    async def _step(self, group: Group, requests: dict[RequestId, str], until: int | None) -> None:
        items = [PrefillItem(request, self.tokens(text), tuple(self.chain(text))) for request, text in requests.items()]
        if until is not None:
            whole_tokens = len(items[0].chain) * self.block_tokens
            items[0] = replace(items[0], until=min(until * self.block_tokens, whole_tokens))

        def noted(result: StepResult) -> None:
            self._leave(group, result.evicted)
            for item, text, each in zip(items, requests.values(), result.items, strict=True):
                end = each.stored.first_depth + each.stored.blocks
                self._come(group, item.chain[:end], each.stored.first_depth)
                self.outcomes.add(each.outcome)
                self.unfinished.pop(item.request, None)
                if each.outcome == "unfinished":
                    self.unfinished[item.request] = group, text
                if each.first_token is not None:
                    self.holding.append(item.request)
                    self.first_tokens.setdefault(text, set()).add(each.first_token.token)

        self.running += requests
        try:
            await self.engine.prefill(PrefillStep(self._epoch, group, tuple(items)), noted)
        finally:
            self.running = [request for request in self.running if request not in requests]

    async def _copy(self, group: Group, text: str, own: bool) -> None:
        operation, chain, epoch = f"c{next(self._names)}", self.chain(text), self._epoch
        access: dict[NodeId, bytes] = {}
        if own:
            lent = await self.engine.pin(operation, chain)
            sources = [each for each in lent.sources if each is not None]
        else:
            lent = await self.engine.pin(operation, [])
            access = {ELSEWHERE: lent.access}
            sources = [Source(SlotRef(0, 0, 1), ELSEWHERE) for _ in chain]

        def noted(copied: Copied) -> None:
            self.outcomes.add(f"copy {copied.failure}")
            if epoch == self._epoch:
                self._leave(group, copied.evicted)
                path = chain[: copied.first_depth + len(copied.blocks)]
                assert tuple(path[copied.first_depth :]) == copied.blocks
                self._come(group, path, copied.first_depth)

        try:
            if (sources and lent.sources[: len(sources)] == tuple(sources)) or access:
                blocks = tuple(chain[: len(sources)])
                plan = CopyPlan(operation, epoch, group, None, blocks, tuple(sources), COPY_LIMIT_S, access)
                await self.engine.copy_blocks(plan, noted)
        finally:
            self.engine.unpin(operation)

    async def _lend(self, lease: str, text: str) -> None:
        self.lent[lease] = await self.engine.pin(lease, self.chain(text))

    # --- the record

    def _come(self, group: Group, path: Sequence[BlockId], first_depth: int) -> None:
        told = self.told[group]
        for depth in range(first_depth, len(path)):
            parent = path[depth - 1] if depth else None
            assert parent is None or parent in told, f"{group}: a block is told before its parent"
            assert path[depth] not in told, f"{group}: a block is told twice"
            told[path[depth]] = parent

    def _leave(self, group: Group, blocks: Sequence[BlockId]) -> None:
        told = self.told[group]
        for block in blocks:
            assert block in told, f"{group}: a block is told to leave that nobody was told of"
            assert block not in told.values(), f"{group}: a block leaves before what is below it"
            del told[block]

    def _resident(self, group: Group) -> dict[BlockId, BlockId | None]:
        found: dict[BlockId, BlockId | None] = {}
        for parent, blocks in self.engine.resident(group).runs:
            for block in blocks:
                found[block], parent = parent, block
        return found

    def check(self) -> None:
        """The index agrees with itself and with what was told, but for what is told to have left with the next result."""
        self.pool.check()
        for group in self.groups:
            untold = set(self.pool._slots.evicted[group])
            held = self._resident(group)
            assert self.told[group].keys() - held.keys() == untold, f"{group}: ghosts, or blocks that nobody knows of"
            assert held.keys() <= self.told[group].keys(), f"{group}: holds what was never told"
