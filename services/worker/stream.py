"""What follows a prefill: the first token at once, then the hand-off of its KV and the tokens that decode makes."""

from contextlib import aclosing

from services.worker.decider import Prefilled, hand_off
from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import Engine, Sampling, Token
from services.worker.frames import Frames
from services.worker.job import Job
from services.worker.origins import of_job
from shared.contracts.commands import Assign, TokenFrame, TokenLogprobs
from shared.contracts.events import Finish
from shared.contracts.ids import decode_rank_of
from shared.runtime.clock import Clock
from shared.runtime.outbox import Outbox

FRAME_GAP_NS = 5_000_000
"""Tokens that follow each other faster travel together: 200 frames a second are smoother than anybody reads."""


def sampling_of(assign: Assign) -> Sampling:
    """The engine's form of the request's sampling fields."""
    asked = assign.sampling
    return Sampling(asked.temperature, asked.top_p, asked.seed, asked.logprobs)


def continuation_of(assign: Assign) -> Continuation | None:
    """What the request is to generate after its first token; None if it ends with it, or nobody decodes here."""
    if assign.decode_worker is None or assign.max_new_tokens == 1:
        return None
    return Continuation(assign.max_new_tokens, frozenset(assign.stop_tokens), decode_rank_of(assign.decode_worker))


class Stream:
    """One job's tokens. The first frame does not wait for the log: a frame is no decision, and TTFT counts."""

    def __init__(self, job: Job, engine: Engine, frames: Frames, outbox: Outbox, clock: Clock) -> None:
        self.index = 0
        self._job = job
        self._engine = engine
        self._frames = frames
        self._outbox = outbox
        self._clock = clock
        self._waiting: list[Token] = []
        self._sent_ns = 0

    async def run(self, prefilled: Prefilled) -> None:
        """Every token up to a stop token, `max_new_tokens`, or the first alone if nothing decodes here.

        Errors: EngineError, EngineDied; Unavailable if the router cannot be told.
        """
        job, assign, first = self._job, self._job.assign, prefilled.item.first_token
        assert first is not None, "only a finished prefill is streamed"
        alone = continuation_of(assign) is None
        stopped = first.token in assign.stop_tokens
        self._waiting.append(first)
        await self._send(
            finish="stop" if stopped else "length" if alone else None,
            cached_tokens=prefilled.cached_tokens,
            queue_us=prefilled.queue_us,
            fetch_us=job.fetched.us if job.fetched else 0,
            prefill_us=prefilled.prefill_us,
        )
        if alone or stopped:
            return
        handed_off = await self._engine.hand_off(job.key.engine_id)
        self._outbox.record(hand_off(job, handed_off), of_job(job))
        self._engine.release(job.key.engine_id)
        job.handed_off = True
        await self._decode(first.token)

    async def _decode(self, first_token: int) -> None:
        """The last frame says how it ended; decode may end earlier than asked, at the end of its memory."""
        assign = self._job.assign
        stop_tokens = frozenset(assign.stop_tokens)
        last = first_token
        tokens = self._engine.decode(
            self._job.key.engine_id, first_token, assign.max_new_tokens - 1, stop_tokens, sampling_of(assign)
        )
        async with aclosing(tokens):
            async for token in tokens:
                last = token.token
                self._waiting.append(token)
                ends = last in stop_tokens or self.index + len(self._waiting) == assign.max_new_tokens
                if not ends and self._clock.monotonic_ns() - self._sent_ns >= FRAME_GAP_NS:
                    await self._send()
        await self._send(finish="stop" if last in stop_tokens else "length")

    async def _send(self, finish: Finish | None = None, **measured: int) -> None:
        """One frame with every token that waits."""
        assign = self._job.assign
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
