"""One request's task: carry its assignments out until it has ended.

    decide + record → stored → `assign` → accepted → frames … → the last one → request-completed
                                 │ refused, silent, aborted, node lost, tokens missing, taken back for an idle worker
                                 └→ request-redirected → decide again (attempt + 1, prompt + generated tokens) → …

Where tenants share the pool it may have to wait for its turn first. It ends by the last token, by the client's leaving (the
task is cancelled), or by running out of attempts, workers or time; each of these records exactly one end. The client is never
told of a redirection: what an engine generates depends on the seed and the position alone, so another worker continues where
this one stopped, without a gap and without a repeat.
"""

import asyncio
from typing import assert_never

import structlog

from services.router import decider, handshake
from services.router.calls import Call, Rejected, Served, Unserved
from services.router.claims import BufferFull
from services.router.frames import Broken, Enough, FrameOrder, Leave, Piece, Signal
from services.router.placing_again import place_again
from services.router.wiring import Placed, Wiring
from shared.contracts.commands import TokenFrame
from shared.contracts.events import (
    Finish,
    RedirectReason,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
)
from shared.model.parameters import WAIT_NS_MAX

LINE_S_MAX = WAIT_NS_MAX / 1e9
"""As long as a worker lets others go before a request."""

LOOK_AGAIN_S = 1.0
GAP_S = 1.0
"""How long missing tokens are waited for: longer than a reconnect reorders, shorter than a client notices."""


class _Stopped(Exception):
    """The attempt goes no further. `node_silent`: nothing was heard of the node's agent."""

    def __init__(self, reason: RedirectReason, *, node_silent: bool = False) -> None:
        self.reason: RedirectReason = reason
        self.node_silent = node_silent


class _ClientGone(Exception):
    """The client does not read its answer."""


class Driver:
    """Drives `call` from a recorded first assignment, or from waiting for it, to its end."""

    def __init__(self, wiring: Wiring, call: Call, first: "Placed | asyncio.Future[Placed]") -> None:
        self._wiring = wiring
        self._call = call
        self._first = first
        self._last: Placed | None = first if isinstance(first, Placed) else None
        self._rebalanced = False
        """Whether the current attempt is for an idle worker."""
        self._logger = structlog.get_logger(component="dispatch").bind(request=call.request)

    async def run(self) -> None:
        """Returns when the end is recorded. Raises nothing."""
        try:
            finish = await self._serve()
        except (asyncio.CancelledError, _ClientGone):
            self.call_off()
        except Rejected as rejected:
            self._call.close(rejected)
            return
        except Unserved as failure:
            self._fail(failure)
        except Exception:
            self._logger.exception("driver failed")
            self._fail(Unserved("internal", "an internal error; the log has the details"))
        else:
            self._complete(finish)
            return
        await self._give_up()

    def call_off(self) -> None:
        """Nobody waits for the answer any more. For a task that was cancelled before its first step, which runs nothing."""
        if self._call.shut_down:
            self._fail(Unserved("shutdown", "the router is shutting down"))
        else:
            self._cancelled()

    @property
    def _placed(self) -> Placed:
        assert self._last is not None, "an attempt begins with an assignment"
        return self._last

    async def _serve(self) -> Finish:
        if not isinstance(self._first, Placed):
            began_ns = self._wiring.clock.monotonic_ns()
            self._last = await self._first
            self._call.held_us = (self._wiring.clock.monotonic_ns() - began_ns) // 1_000
        while True:
            try:
                return await self._attempt()
            except _Stopped as stopped:
                if stopped.reason == "no-reply":
                    # The agent may be at work on it, and decode until the end for nobody.
                    await self._give_up()
                if finish := self._finished_anyway():
                    return finish
                self._check_grammar()
                self._redirect(stopped)
                await self._place_again(stopped.reason)

    # --- one attempt

    async def _attempt(self) -> Finish:
        """Errors: _Stopped to go on elsewhere; Unserved to give up."""
        assigned, event = self._placed
        predicted_s = (assigned.queue_us + assigned.service_us) / 1e6
        first_by_s = 2 * predicted_s + self._wiring.settings.first_token_slack_s
        began = asyncio.get_running_loop().time()
        deadline = began + first_by_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._wiring.outbox.stored(event)
                await self._give(assigned)
            return await self._follow(FrameOrder(assigned.attempt), deadline)
        except TimeoutError:
            waited_s = asyncio.get_running_loop().time() - began
            detail = f"no token came within {waited_s:.1f} s"
            raise Unserved("lost-stream", detail, self._wiring.retry_after_s()) from None

    async def _give(self, assigned: RequestAssigned) -> None:
        """Errors: _Stopped unless the agent takes it."""
        call, wiring = self._call, self._wiring
        if assigned.attempt == 1:
            wiring.metrics.assign_s.observe((wiring.clock.monotonic_ns() - call.order.arrived_ns) / 1e9)
        if (reason := await handshake.give(wiring, call, self._placed, rebalanced=self._rebalanced)) is not None:
            raise _Stopped(reason, node_silent=reason == "no-reply")

    async def _follow(self, order: FrameOrder, first_by: float) -> Finish:
        """Hand tokens over until the last. Errors: _Stopped, _ClientGone; TimeoutError while there is no token."""
        attempt = self._placed.assigned.attempt
        while True:
            match await self._next(order, first_by):
                case TokenFrame(error=str() as error) as frame if frame.attempt == attempt:
                    self._logger.warning("attempt broke off", attempt=attempt, error=error)
                    raise _Stopped(handshake.ABORT_REASON.get(error, "aborted"))
                case TokenFrame() as frame:
                    for piece in order.take(frame):
                        self._hand_over(piece)
                        if piece.frame.finish is not None:
                            return piece.frame.finish
                case Broken() as broken if broken.attempt == attempt:
                    raise _Stopped(broken.reason)
                case Broken():
                    pass
                case Leave() as leave:
                    if leave.attempt == attempt and not order.tokens:
                        await self._leave()
                case Enough():
                    await self._give_up()
                    return "stop"
                case other:
                    assert_never(other)

    async def _leave(self) -> None:
        """Errors: _Stopped if it was still queued."""
        if await handshake.take_back(self._wiring, self._placed.assigned):
            raise _Stopped("rebalanced")

    async def _next(self, order: FrameOrder, first_by: float) -> Signal:
        """A first token may come up to `LINE_S_MAX` after `first_by` while the worker serves others: they may be shorter, and
        the prediction could not know of those that came later."""
        loop, first_by_last = asyncio.get_running_loop(), first_by + LINE_S_MAX
        while True:
            now = loop.time()
            limit = now + self._wiring.settings.idle_timeout_s if order.tokens else first_by
            if order.has_gap:
                limit = min(limit, now + GAP_S)
            try:
                async with asyncio.timeout_at(limit):
                    return await self._call.inbox.get()
            except TimeoutError:
                if order.tokens or order.has_gap:
                    raise _Stopped("no-reply") from None
                wiring = self._wiring
                if now >= first_by_last or not wiring.state.loads.has_company(
                    self._call.request, wiring.clock.now_ns()
                ):
                    raise
                first_by = min(max(first_by, now) + LOOK_AGAIN_S, first_by_last)

    def _hand_over(self, piece: Piece) -> None:
        call, wiring = self._call, self._wiring
        call.last_token_ns = wiring.clock.monotonic_ns()
        if call.served is None:
            ttft_us = (call.last_token_ns - call.order.arrived_ns) // 1_000
            call.served = Served(self._placed.event.id, self._placed.assigned.worker, piece.frame, ttft_us)
            wiring.metrics.ttft_s.observe(ttft_us / 1e6)
        if not call.give(piece):
            raise _ClientGone

    # --- between two attempts

    def _finished_anyway(self) -> Finish | None:
        """The answer is whole although its last frame is missing, or the client needs no more of it."""
        call = self._call
        if call.is_enough:
            return "stop"
        if call.generated and call.generated[-1] in call.order.stop_tokens:
            return "stop"
        return "length" if not call.tokens_left else None

    def _check_grammar(self) -> None:
        """Errors: Unserved, because a grammar begins with an answer: nobody could go on inside one."""
        if self._call.generated and self._call.order.sampling.json_schema is not None:
            raise Unserved("lost-stream", "the worker was lost within an answer that response_format binds; ask again")

    def _redirect(self, stopped: _Stopped) -> None:
        """Errors: Unserved when no attempt is left."""
        call, wiring, attempt, reason = self._call, self._wiring, self._placed.assigned.attempt, stopped.reason
        facts = decider.redirect(wiring.state, call.request, attempt, reason, node_silent=stopped.node_silent)
        wiring.record(call, facts, self._placed)
        wiring.metrics.redirected.labels(reason).inc()
        self._logger.info("redirected", attempt=attempt, reason=reason)
        if any(isinstance(fact, RequestFailed) for fact in facts):
            raise Unserved(
                "attempts-exhausted",
                f"no worker served the request in {self._placed.assigned.attempt} attempts",
                wiring.retry_after_s(),
            )

    async def _place_again(self, reason: RedirectReason) -> None:
        """Errors: Unserved when no worker comes in time."""
        wiring, pauses = self._wiring, reason != "rebalanced" and not self._rebalanced
        placed = self._last = await place_again(wiring, self._call, self._placed, pauses=pauses)
        # It may have found a better place than the idle worker, and takes its turn there.
        winner = placed.assigned.candidates[0]
        self._rebalanced = reason == "rebalanced" and not winner.queue_us and not winner.delayed_jobs
        try:
            wiring.claims.hold(self._call.request, placed.assigned.attempt, self._call.prompt)
        except BufferFull as full:
            raise Unserved("overloaded", str(full), wiring.retry_after_s()) from full

    # --- the end

    def _complete(self, finish: Finish) -> None:
        call, metrics = self._call, self._wiring.metrics
        completed = call.completed(finish)
        self._end(completed)
        metrics.prompt_tokens.labels("cached").inc(completed.cached_tokens)
        metrics.prompt_tokens.labels("computed").inc(max(0, call.order.prompt_tokens - completed.cached_tokens))
        metrics.output_tokens.inc(len(call.generated))
        call.close(finish)

    def _fail(self, failure: Unserved) -> None:
        match failure.reason:
            case "attempts-exhausted" | "no-worker" | "lost-stream" | "shutdown" | "internal" as reason:
                self._end(RequestFailed(request=self._call.request, reason=reason))
            case "too-long" | "overloaded" | "rate-limited" | "slo" | "client-left":
                self._end(RequestFailed(request=self._call.request, reason="internal"))
            case _:
                assert_never(failure.reason)
        self._logger.warning("request failed", reason=failure.reason, detail=str(failure))
        self._call.close(failure)

    def _cancelled(self) -> None:
        self._end(RequestCancelled(request=self._call.request))
        self._call.close(Unserved("client-left", "the client has left, or does not read its answer"))

    def _end(self, fact: RequestCompleted | RequestFailed | RequestCancelled) -> None:
        """Recorded at once; one that `redirect` has recorded already is not recorded again."""
        self._wiring.end(self._call, fact, self._last)
        self._wiring.metrics.ended.labels(fact.TYPE.removeprefix("request-")).inc()

    async def _give_up(self) -> None:
        if self._last is not None:
            await handshake.give_up(self._wiring, self._last.assigned)
