"""Prefills of an SGLang engine: the requests of a step sent together, what they came to, and what caches have learned by it."""

import asyncio
from collections.abc import Sequence
from itertools import chain

from services.worker.engine.protocol import EngineDied, EngineError, ItemResult, PrefillItem, PrefillStep, StepResult
from services.worker.engine.sglang.cache_index import CacheIndex
from services.worker.engine.sglang.decoding import Decoding
from services.worker.engine.sglang.fleet import Fleet
from services.worker.engine.sglang.generation import Part
from services.worker.engine.sglang.generations import Generation, Generations
from services.worker.engine.sglang.page_hashes import page_hashes, salt_of
from services.worker.engine.sglang.server import ServerLost
from shared.contracts.ids import RequestId
from shared.model.lattice import Group
from shared.runtime.clock import Clock


class Prefills:
    """`block_tokens` is also SGLang's page. What is finished is given to `decoding`."""

    def __init__(
        self,
        fleet: Fleet,
        index: CacheIndex,
        generations: Generations,
        decoding: Decoding,
        clock: Clock,
        block_tokens: int,
    ) -> None:
        self._fleet, self._index, self._generations, self._decoding = fleet, index, generations, decoding
        self._clock, self._block_tokens = clock, block_tokens
        self.running: dict[Group, list[Generation]] = {}
        self._beside: set[Generation] = set()
        self._cancelled: set[RequestId] = set()

    async def run(self, step: PrefillStep) -> StepResult:
        """One step that has been checked. Returns in the turn in which it became true. Errors: EngineDied, EngineError."""
        began_ns = self._clock.monotonic_ns()
        generations = [self._begin(item, step.group) for item in step.items]
        self.running[step.group] = generations
        try:
            parts = await self._finished(generations)
            evicted = self._index.take_evicted(step.group)
            items = tuple(
                self._result(step.group, generation, part) for generation, part in zip(generations, parts, strict=True)
            )
        except BaseException:
            for generation in generations:
                self._generations.end(generation)
            raise
        finally:
            del self.running[step.group]
            self._cancelled.difference_update(item.request for item in step.items)
        return StepResult(items, step_s(parts, (self._clock.monotonic_ns() - began_ns) / 1e9), evicted)

    async def compute(self, item: PrefillItem, group: Group) -> None:
        """A prefill for its blocks alone, beside the steps. Errors: EngineDied, EngineError."""
        generation = self._begin(item, group)
        self._beside.add(generation)
        try:
            await self._finished([generation])
            generation.cache.confirm(generation.watcher, generation.pages)
        finally:
            self._beside.discard(generation)
            self._generations.end(generation)

    def cancel(self, request: RequestId) -> bool:
        """Whether it was running. Its step goes on without it."""
        for generations in self.running.values():
            for generation in generations:
                if generation.item.request == request:
                    self._cancelled.add(request)
                    self._generations.end(generation)
                    return True
        return False

    def lose_rank(self, rank: int, reason: str) -> None:
        """A decode server is gone: no prefill that is to meet it goes on waiting."""
        for generation in chain(self._beside, *self.running.values()):
            if generation.decode_rank == rank and generation.decoding is not None:
                generation.decoding.fail(EngineError(reason))

    def close(self) -> None:
        """Nobody waits for what runs."""
        for generations in self.running.values():
            for generation in generations:
                self._generations.end(generation)

    def _begin(self, item: PrefillItem, group: Group) -> Generation:
        pages = page_hashes(item.tokens, self._block_tokens, salt_of(item.request, item.chain))
        raw = item.tokens[: len(pages) * self._block_tokens].astype("<u4", copy=False).tobytes()
        self._index.prune({page for running in self.running.values() for each in running for page in each.pages})
        self._index.learn(pages, item.chain, raw)
        return self._generations.begin(item, group, pages)

    async def _finished(self, generations: Sequence[Generation]) -> list[Part | None]:
        """What each prefill came to, None for one that was cancelled. Errors: EngineDied, EngineError."""
        whole = asyncio.gather(*(each.task for each in generations), return_exceptions=True)
        await asyncio.wait((whole, self._fleet.lost), return_when=asyncio.FIRST_COMPLETED)
        if self._fleet.lost.done():
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)  # nobody else would read that it was cancelled
            self._fleet.check()
        parts: list[Part | None] = []
        for generation, ended in zip(generations, whole.result(), strict=True):
            if generation.item.request in self._cancelled:
                parts.append(None)
            elif isinstance(ended, ServerLost):
                self._fleet.lose(str(ended))
                raise EngineDied(str(ended))
            elif isinstance(ended, BaseException):
                raise ended
            else:
                parts.append(ended)
        return parts

    def _result(self, group: Group, generation: Generation, part: Part | None) -> ItemResult:
        item, end = generation.item, generation.end_tokens
        whole_blocks = end // self._block_tokens
        if part is None:
            stored = self._index.take_stored(group, item.chain)
            return ItemResult(item.request, 0, 0, None, stored, "cancelled")
        generation.cache.confirm(generation.watcher, generation.pages[:whole_blocks])
        cached_tokens = min(part.cached_tokens, end - 1)
        stored = self._index.take_stored(group, item.chain[:whole_blocks])
        if item.until is not None:
            return ItemResult(item.request, cached_tokens, end - cached_tokens, None, stored, "unfinished")
        self._decoding.finished(generation)
        return ItemResult(item.request, cached_tokens, end - cached_tokens, part.tokens[0], stored, "finished")


def step_s(parts: Sequence[Part | None], measured_s: float) -> float:
    """As the server measured it, from its first prefill's start to its last one's end; else as it looked from here. A server's
    clock may be set meanwhile, and no step ends before it begins, nor takes longer than its answers."""
    told = [(part.began_s, part.ended_s) for part in parts if part is not None]
    began = [began_s for began_s, _ in told if began_s]
    ended = [ended_s for _, ended_s in told if ended_s]
    if not len(told) == len(began) == len(ended) > 0:
        return measured_s
    told_s = max(ended) - min(began)
    return told_s if 0 < told_s < measured_s else measured_s
