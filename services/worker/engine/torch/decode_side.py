"""The frontend of the decode ranks: hand-offs and token streams. Part of `TorchEngine`."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from services.worker.engine.kv_pool import Reservation
from services.worker.engine.protocol import Cancelled, EngineDied, EngineError, HandedOff, Sampling, Token
from services.worker.engine.torch.messages import Decode, Done, End, HandOff
from services.worker.engine.torch.rank_process import RankProcess, TokenStream
from services.worker.engine.torch.ranks import Ranks
from services.worker.engine.torch.settings import TorchSettings
from shared.contracts.ids import RequestId


@dataclass(slots=True)
class _Sequence:
    """A request on the decode side. `rank` is None while the hand-off waits for room, the rest until `decode`."""

    prompt_tokens: int
    hand_off: asyncio.Task[HandedOff]
    rank: RankProcess | None = None
    decode: int | None = None
    stream: TokenStream | None = None


class DecodeSide:
    """At most `sequences_per_decode_rank` sequences are open on each rank; a hand-off beyond that waits."""

    def __init__(
        self, ranks: Ranks, settings: TorchSettings, context_tokens: int, block_bytes: int, numbers: Iterator[int]
    ) -> None:
        self._ranks, self._context_tokens, self._block_bytes, self._numbers = (
            ranks,
            context_tokens,
            block_bytes,
            numbers,
        )
        self._room = asyncio.Semaphore(settings.sequences_per_decode_rank * settings.decode_ranks)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._died: str | None = None

    async def hand_off(self, request: RequestId, finished: Reservation | None) -> HandedOff:
        """Copy the prompt's KV to the decode rank with the fewest sequences. A repetition gets the same answer, even when
        the prefill's pins are gone. EngineError if there is neither a sequence nor a finished prefill."""
        if not self._ranks.decode:
            raise EngineError("hand-off: this node has no decode ranks")
        sequence = self._sequences.get(request)
        if sequence is None:
            if finished is None:
                raise EngineError(f"request {request}: has no finished prefill")
            task = asyncio.create_task(self._copy(finished))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have gone
            sequence = self._sequences[request] = _Sequence(finished.prompt_tokens, task)
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

    def reading(self, request: RequestId) -> asyncio.Task[HandedOff] | None:
        """The hand-off that still reads (or will read) the request's blocks."""
        sequence = self._sequences.get(request)
        return None if sequence is None or sequence.hand_off.done() else sequence.hand_off

    async def _copy(self, reservation: Reservation) -> HandedOff:
        await self._room.acquire()
        # Ending a sequence cancels this task, so whoever gets here is in the table.
        sequence = self._sequences[reservation.request]
        load = Counter(other.rank.rank for other in self._sequences.values() if other.rank is not None)
        sequence.rank = min(self._ranks.decode, key=lambda rank: load[rank.rank])
        command = HandOff(next(self._numbers), reservation.request, reservation.prompt_tokens, reservation.slots)
        done = await sequence.rank.ask(command)
        assert isinstance(done, Done), f"a hand-off is answered by Done, not {done.kind}"
        return HandedOff(reservation.request, len(reservation.slots) * self._block_bytes, done.seconds)

    async def decode(
        self, request: RequestId, first_token: int, max_new_tokens: int, stop_tokens: frozenset[int], sampling: Sampling
    ) -> AsyncGenerator[Token, None]:
        """See `Engine.decode`. The end of the context ends the sequence as well."""
        sequence = self._sequences.get(request)
        if sequence is None or sequence.rank is None or not sequence.hand_off.done():
            raise EngineError(f"request {request}: decode needs a finished hand-off")
        if sequence.stream is not None:
            raise EngineError(f"request {request}: is being decoded already")
        new_tokens = min(max_new_tokens, self._context_tokens - sequence.prompt_tokens)
        try:
            if new_tokens < 1:
                return
            sequence.decode = n = next(self._numbers)
            command = Decode(n, request, first_token, new_tokens, tuple(sorted(stop_tokens)), sampling)
            sequence.stream = sequence.rank.stream(command)
            last = False
            while not last:
                message = await sequence.stream.get()
                if isinstance(message, EngineError):
                    raise message
                last = message.last
                yield message.token
        finally:
            self.end(request)

    def end(self, request: RequestId) -> None:
        """Free the request's sequence; whoever waits for it gets `Cancelled`. Unknown requests are ignored."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return
        sequence.hand_off.cancel()
        if sequence.stream is not None:
            sequence.stream.put_nowait(Cancelled(f"request {request}: cancelled"))
        if sequence.rank is not None:
            # Commands are handled in order, so the memory is free before the next hand-off asks for it.
            sequence.rank.end(End(next(self._numbers), request), sequence.decode)
            self._room.release()

    def fail(self, reason: str) -> None:
        """The ranks are gone: whoever waits for a hand-off gets `EngineDied`."""
        self._died = reason
        for sequence in self._sequences.values():
            sequence.hand_off.cancel()
        self._sequences.clear()
