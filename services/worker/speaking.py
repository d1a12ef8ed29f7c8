"""Generated tokens of one request, on their way from an engine to the router: frame by frame, whoever has prefilled it."""

from contextlib import aclosing

from services.worker.engine.continuation import Continuation, Past
from services.worker.engine.protocol import Engine, Sampling, Token
from services.worker.frames import Frames
from shared.contracts.commands import Assign, TokenFrame, TokenLogprobs
from shared.contracts.events import Finish
from shared.contracts.ids import RequestId, decode_rank_of
from shared.runtime.clock import Clock

FRAME_GAP_NS = 5_000_000
"""Tokens that follow each other faster travel together: 200 frames a second are smoother than anybody reads."""


def sampling_of(assign: Assign) -> Sampling:
    """The engine's form of the request's sampling fields."""
    asked = assign.sampling
    return Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        logprobs=asked.logprobs,
        top_k=asked.top_k,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=tuple(asked.logit_bias.items()),
        min_tokens=asked.min_tokens,
        stops=assign.stop_tokens if asked.min_tokens else (),
        json_schema=asked.json_schema,
    )


def continuation_of(assign: Assign) -> Continuation | None:
    """What the request is to generate after its first token; None if it ends with it, or nobody decodes."""
    if assign.decode_worker is None or assign.max_new_tokens == 1:
        return None
    return Continuation(assign.max_new_tokens, frozenset(assign.stop_tokens), decode_rank_of(assign.decode_worker))


class Speaker:
    """`index` tokens have been sent, by this node or by another before it."""

    def __init__(self, assign: Assign, frames: Frames, clock: Clock, index: int = 0) -> None:
        self.index = index
        self._assign, self._frames, self._clock = assign, frames, clock
        self._waiting: list[Token] = []
        self._sent_ns = 0

    async def say(self, token: Token, finish: Finish | None = None, **measured: int) -> None:
        """A frame of its own. Errors: Unavailable if the router cannot be told."""
        self._waiting.append(token)
        await self._send(finish, **measured)

    async def decode(self, engine: Engine, request: RequestId, first_token: int, past: Past) -> None:
        """Every token after the first that the engine makes of a request that was handed off. The last frame says how it ended;
        decode may end earlier than asked, at the end of its memory.

        Errors: EngineError, EngineDied; Unavailable if the router cannot be told.
        """
        assign, last = self._assign, first_token
        stop_tokens = frozenset(assign.stop_tokens)
        sampling = sampling_of(assign)
        tokens = engine.decode(request, first_token, assign.max_new_tokens - 1, stop_tokens, sampling, past)
        async with aclosing(tokens):
            async for token in tokens:
                last = token.token
                self._waiting.append(token)
                ends = last in stop_tokens or self.index + len(self._waiting) == assign.max_new_tokens
                if not ends and self._clock.monotonic_ns() - self._sent_ns >= FRAME_GAP_NS:
                    await self._send()
        await self._send("stop" if last in stop_tokens else "length")

    async def _send(self, finish: Finish | None = None, **measured: int) -> None:
        """One frame with every token that waits."""
        assign = self._assign
        asked = bool(assign.sampling.logprobs)
        frame = TokenFrame(
            request=assign.request,
            attempt=assign.attempt,
            index=self.index,
            tokens=tuple(each.token for each in self._waiting),
            logprobs=tuple(TokenLogprobs(alternatives=each.logprobs) for each in self._waiting) if asked else (),
            finish=finish,
            **measured,
        )
        self._waiting.clear()
        self._sent_ns = self._clock.monotonic_ns()
        await self._frames.send(assign, frame)
        self.index += len(frame.tokens)
