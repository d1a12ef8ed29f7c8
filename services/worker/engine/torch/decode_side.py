"""The frontend of the decode ranks: hand-offs and token streams. Part of `TorchEngine`.

A hand-off is a move like a copy (`mover_side`), only that it fills the context of a sequence. Which context is whose is decided
here: a decode rank learns of a sequence when its prompt is there, and a context is free again once its rank and the mover have
both said that nothing more is written to it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from services.worker.engine.continuation import Past
from services.worker.engine.copy_plan import HandOffPlan
from services.worker.engine.protocol import Cancelled, EngineDied, EngineError, HandedOff, Sampling, Token
from services.worker.engine.torch.messages import Decode, End, Reply
from services.worker.engine.torch.move_messages import BlockMove, ContextRef, Moved
from services.worker.engine.torch.mover import HAND_OFFS_MAX
from services.worker.engine.torch.mover_side import MoverSide, UnderWay
from services.worker.engine.torch.parts import NOT_FINITE
from services.worker.engine.torch.rank_process import RankProcess, TokenStream
from services.worker.engine.torch.ranks import Ranks
from services.worker.engine.torch.settings import TorchSettings
from shared.contracts.ids import RequestId

TRIES_MAX = 2
"""A mover that ends over another move's source takes the hand-offs within its node along, and the next one is quick to
start."""


class _Place(NamedTuple):
    """A context. `rank` is counted from the first decode rank on."""

    rank: int
    sequence: int


@dataclass(slots=True)
class _Sequence:
    """A request on the decode side. `place` is None while the hand-off waits for room, the rest until `decode`. `filling` is
    what brings the prompt's KV, right through a cancellation."""

    prompt_tokens: int
    hand_off: asyncio.Task[HandedOff]
    under_way: UnderWay = field(default_factory=UnderWay)
    place: _Place | None = None
    filling: asyncio.Task[Moved] | None = None
    decode: int | None = None
    stream: TokenStream | None = None


class DecodeSide:
    """At most `sequences_per_decode_rank` sequences are open on each rank; a hand-off beyond that waits."""

    def __init__(
        self, ranks: Ranks, mover: MoverSide, settings: TorchSettings, context_tokens: int, numbers: Iterator[int]
    ) -> None:
        self._ranks, self._mover, self._context_tokens, self._numbers = ranks, mover, context_tokens, numbers
        self._block_tokens = settings.block_tokens
        self._room = asyncio.Semaphore(settings.sequences_per_decode_rank * settings.decode_ranks)
        self._free = [[*reversed(range(settings.sequences_per_decode_rank))] for _ in range(settings.decode_ranks)]
        self._moves = asyncio.Semaphore(HAND_OFFS_MAX)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._died: str | None = None

    # --- hand-off

    async def hand_off(self, request: RequestId, plan: HandOffPlan | None) -> HandedOff:
        """Carry out the plan, to the decode rank with the fewest sequences. A repetition gets the same answer, even when the
        prefill's pins are gone. EngineError if there is neither a sequence nor a plan."""
        if not self._ranks.decode:
            raise EngineError("hand-off: this node has no decode ranks")
        sequence = self._sequences.get(request)
        if sequence is None:
            if plan is None:
                raise EngineError(f"request {request}: has no finished prefill")
            self._check(request, plan)
            task = asyncio.create_task(self._bring(request, plan))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone
            sequence = self._sequences[request] = _Sequence(plan.prompt_tokens, task)
        try:
            return await asyncio.shield(sequence.hand_off)
        except asyncio.CancelledError:
            if self._died is not None:
                raise EngineDied(self._died) from None
            if sequence.hand_off.cancelled():
                raise Cancelled(f"request {request}: cancelled during its hand-off") from None
            raise
        except EngineError:
            self.end(request)
            raise

    def _check(self, request: RequestId, plan: HandOffPlan) -> None:
        if not 1 <= plan.prompt_tokens <= self._context_tokens:
            raise EngineError(f"prompt_tokens: {plan.prompt_tokens} is outside [1, {self._context_tokens}]")
        blocks = -(-plan.prompt_tokens // self._block_tokens)
        if len(plan.sources) != blocks:
            raise EngineError(f"request {request}: sources: {len(plan.sources)} for a prompt of {blocks} blocks")

    def reading(self, request: RequestId) -> asyncio.Task[HandedOff] | None:
        """The hand-off that still reads (or will read) the request's blocks."""
        sequence = self._sequences.get(request)
        return None if sequence is None or sequence.hand_off.done() else sequence.hand_off

    async def _bring(self, request: RequestId, plan: HandOffPlan) -> HandedOff:
        await self._room.acquire()
        # Ending a sequence cancels this task, so whoever gets here is in the table.
        sequence = self._sequences[request]
        rank = max(range(len(self._free)), key=lambda rank: (len(self._free[rank]), -rank))
        sequence.place = place = _Place(rank, self._free[rank].pop())
        sequence.filling = asyncio.create_task(self._fill(plan, place, sequence.under_way))
        sequence.filling.add_done_callback(lambda done: done.cancelled() or done.exception())
        moved = await asyncio.shield(sequence.filling)
        if self._ranks.lost is not None:
            raise EngineDied(self._ranks.lost)
        if moved.failure is not None:
            raise EngineError(f"request {request}: its KV was not handed off: {moved.failure}: {moved.detail}")
        return HandedOff(request, moved.bytes, moved.seconds)

    async def _fill(self, plan: HandOffPlan, place: _Place, under_way: UnderWay) -> Moved:
        """When this returns, nothing more is written."""
        nodes = list(plan.access)
        blocks = [
            BlockMove(
                source.slot,
                ContextRef(place.rank, place.sequence, depth),
                None if source.node is None else nodes.index(source.node),
                source.checksum,
            )
            for depth, source in enumerate(plan.sources)
        ]
        async with self._moves:
            for _ in range(TRIES_MAX):
                moved = await self._mover.move(blocks, plan.access, plan.limit_s, under_way)
                if not moved.abandoned or nodes or under_way.called_off:
                    break
        return moved

    # --- tokens

    async def decode(
        self,
        request: RequestId,
        first_token: int,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling,
        past: Past,
    ) -> AsyncGenerator[Token, None]:
        """See `Engine.decode`. The end of the context ends the sequence as well."""
        sequence = self._sequences.get(request)
        if sequence is None or sequence.place is None or not sequence.hand_off.done():
            raise EngineError(f"request {request}: decode needs a finished hand-off")
        if sequence.stream is not None:
            raise EngineError(f"request {request}: is being decoded already")
        new_tokens = min(max_new_tokens, self._context_tokens - sequence.prompt_tokens)
        try:
            if new_tokens < 1:
                return
            sequence.decode = n = next(self._numbers)
            command = Decode(
                n=n,
                sequence=sequence.place.sequence,
                prompt_tokens=sequence.prompt_tokens,
                first_token=first_token,
                new_tokens=new_tokens,
                stop_tokens=tuple(sorted(stop_tokens)),
                sampling=sampling,
                past=past,
            )
            sequence.stream = self._rank(sequence.place).stream(command)
            last = False
            while not last:
                message = await sequence.stream.get()
                if isinstance(message, EngineError):
                    raise message
                if message.token is None:
                    raise EngineError(f"request {request}: {NOT_FINITE}")
                last = message.last
                yield message.token
        finally:
            self.end(request)

    # --- the end

    def end(self, request: RequestId) -> None:
        """Free the request's sequence; whoever waits for it gets `Cancelled`. Unknown requests are ignored."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return
        sequence.hand_off.cancel()
        if sequence.stream is not None:
            sequence.stream.put_nowait(Cancelled(f"request {request}: cancelled"))
        if sequence.filling is not None and not sequence.filling.done():
            self._mover.call_off(sequence.under_way)
            sequence.filling.add_done_callback(lambda _: self._leave(sequence))
        else:
            self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        """The mover writes no more to the sequence's context; when its rank does not either, it is free."""
        if (place := sequence.place) is None or self._ranks.lost is not None:
            return
        ended = self._rank(place).end(End(next(self._numbers), place.sequence), sequence.decode)
        ended.add_done_callback(partial(self._freed, place))

    def _freed(self, place: _Place, ended: asyncio.Future[Reply]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            self._free[place.rank].append(place.sequence)
            self._room.release()

    def _rank(self, place: _Place) -> RankProcess:
        return self._ranks.decode[place.rank]

    def fail(self, reason: str) -> None:
        """The ranks are gone: whoever waits for a hand-off gets `EngineDied`."""
        self._died = reason
        for sequence in self._sequences.values():
            sequence.hand_off.cancel()
        self._sequences.clear()
