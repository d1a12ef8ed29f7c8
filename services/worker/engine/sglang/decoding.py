"""What follows finished prefills: tokens that SGLang already makes, kept until they are asked for."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.worker.engine.protocol import EngineDied, EngineError, HandedOff, Token
from services.worker.engine.sglang.fleet import Fleet
from services.worker.engine.sglang.generations import Generation, Generations
from shared.contracts.ids import RequestId
from shared.runtime.clock import Clock


class Decoding:
    """`token_bytes` is the KV of one token."""

    def __init__(self, fleet: Fleet, generations: Generations, clock: Clock, token_bytes: int) -> None:
        self._fleet, self._generations, self._clock, self._token_bytes = fleet, generations, clock, token_bytes
        self._prefilled: dict[RequestId, Generation] = {}
        self._handed_off: dict[RequestId, HandedOff] = {}

    def finished(self, generation: Generation) -> None:
        """A prefill has its first token."""
        self._prefilled[generation.item.request] = generation

    async def hand_off(self, request: RequestId) -> HandedOff:
        """SGLang has begun it with the prefill; it is over when the decode server has a token. Errors: EngineError."""
        if request in self._handed_off:
            return self._handed_off[request]
        generation = self._prefilled.get(request)
        if generation is None or generation.stream is None:
            raise EngineError(f"hand_off: request {request} has no finished prefill here that was to be decoded")
        began_ns = self._clock.monotonic_ns()
        await generation.stream.first()
        moved = 0 if generation.decode_rank is None else len(generation.item.tokens) * self._token_bytes
        handed_off = HandedOff(request, moved, (self._clock.monotonic_ns() - began_ns) / 1e9)
        self._handed_off[request] = handed_off
        return handed_off

    async def tokens(
        self, request: RequestId, new_tokens_max: int, stop_tokens: frozenset[int]
    ) -> AsyncGenerator[Token, None]:
        """See `Engine.decode`: no more than the prefill was told to generate."""
        generation = self._prefilled.get(request)
        if request not in self._handed_off or generation is None:
            raise EngineError(f"decode: request {request} was not handed off")
        assert generation.stream is not None, "only what is decoded is handed off"
        left = new_tokens_max
        try:
            async with aclosing(generation.stream.tokens()) as tokens:
                async for token in tokens:
                    if left <= 0:
                        return
                    left -= 1
                    yield token
                    if token.token in stop_tokens:
                        return
        finally:
            self.drop(request)

    def release(self, request: RequestId) -> None:
        """What is handed off goes on; of the rest nothing is wanted."""
        if request not in self._handed_off:
            self.drop(request)

    def drop(self, request: RequestId) -> None:
        """Nobody wants more of it, whatever it does."""
        self._handed_off.pop(request, None)
        generation = self._prefilled.pop(request, None)
        if generation is not None and not self._fleet.lost.done():
            self._generations.end(generation)

    def lose_rank(self, rank: int, reason: str) -> None:
        """A decode server is gone: the streams that it had break off, and their requests go on elsewhere."""
        for generation in self._prefilled.values():
            if generation.decode_rank == rank and generation.stream is not None:
                generation.stream.fail(EngineError(reason))

    def close(self, reason: str) -> None:
        """Every stream breaks off."""
        for generation in self._prefilled.values():
            if generation.stream is not None:
                generation.stream.fail(EngineDied(reason))
