"""Generated tokens on their way from an agent to the request that waits for them.

Core NATS delivers at most once, and handlers are tasks of their own: frames may be missing, doubled or (after a reconnect)
out of order. `FrameOrder` makes a sequence of them in which every token stands once; what cannot be put in order shows as a
gap, and the request goes on elsewhere behind the last token it has.
"""

import asyncio
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from shared.contracts.commands import TokenFrame, TokenLogprobs
from shared.contracts.events import RedirectReason
from shared.contracts.ids import RequestId, RouterId
from shared.contracts.subjects import Subjects
from shared.runtime.ports import Bus

HELD_FRAMES_MAX = 64
"""Frames behind a gap that are kept: what a reconnect can reorder is a handful."""

WAITING_FRAMES_MAX = 1_024
"""Frames a request has not looked at. Its driver only folds them, so this many mean that the process is stuck."""


class Piece(NamedTuple):
    """Tokens in order, none of them given before. The attempt's first piece carries the agent's measurements in `frame`."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    frame: TokenFrame


class FrameOrder:
    """One attempt's tokens, each once and in order. Frames of other attempts are dropped."""

    def __init__(self, attempt: int) -> None:
        self.tokens = 0
        self._attempt = attempt
        self._held: dict[int, TokenFrame] = {}

    @property
    def has_gap(self) -> bool:
        """A frame has come whose predecessor has not."""
        return bool(self._held)

    def take(self, frame: TokenFrame) -> list[Piece]:
        """What has become deliverable. Empty for a duplicate, for another attempt, and behind a gap."""
        if frame.attempt != self._attempt:
            return []
        if frame.index > self.tokens:
            if len(self._held) < HELD_FRAMES_MAX:
                self._held[frame.index] = frame
            return []
        pieces = self._deliver(frame)
        while (follower := next((index for index in self._held if index <= self.tokens), None)) is not None:
            pieces += self._deliver(self._held.pop(follower))
        return pieces

    def _deliver(self, frame: TokenFrame) -> list[Piece]:
        known = self.tokens - frame.index
        tokens, logprobs = frame.tokens[known:], frame.logprobs[known:]
        if not tokens and frame.finish is None:
            return []
        self.tokens += len(tokens)
        return [Piece(tokens, logprobs, frame)]


class Leave(NamedTuple):
    """A worker has nothing to do: if an attempt still waits for another, it goes there."""

    attempt: int


class Broken(NamedTuple):
    """An attempt goes no further."""

    attempt: int
    reason: RedirectReason


class Enough(NamedTuple):
    """The client's stop string has come: no more tokens are needed."""


Signal = TokenFrame | Broken | Enough | Leave


class Inbox:
    """What one open request is told, in order of arrival."""

    def __init__(self) -> None:
        self._signals: asyncio.Queue[Signal] = asyncio.Queue()

    def put(self, signal: Signal) -> bool:
        """False if a frame was dropped, because too many wait. Other signals are never dropped: an attempt has few."""
        if isinstance(signal, TokenFrame) and self._signals.qsize() >= WAITING_FRAMES_MAX:
            return False
        self._signals.put_nowait(signal)
        return True

    async def get(self) -> Signal:
        return await self._signals.get()


class Frames:
    """One subscription for all of the router's token streams, and an inbox per open request."""

    def __init__(self, bus: Bus, subjects: Subjects, router: RouterId) -> None:
        self._bus = bus
        self._subject = subjects.all_frames(router)
        self._inboxes: dict[RequestId, Inbox] = {}
        self._logger = structlog.get_logger(component="frames")

    async def start(self) -> None:
        """Errors: Unavailable."""
        await self._bus.subscribe(self._subject, self._receive)

    def open(self, request: RequestId) -> Inbox:
        inbox = self._inboxes[request] = Inbox()
        return inbox

    def close(self, request: RequestId) -> None:
        """Frames that come later are dropped."""
        self._inboxes.pop(request, None)

    async def _receive(self, subject: str, payload: bytes) -> None:
        try:
            frame = TokenFrame.model_validate_json(payload)
        except ValidationError as error:
            self._logger.warning("unreadable frame", subject=subject, errors=error.error_count())
            return
        inbox = self._inboxes.get(frame.request)
        if inbox is not None and not inbox.put(frame):
            self._logger.warning("frame dropped", request=frame.request, limit=WAITING_FRAMES_MAX)
