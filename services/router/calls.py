"""One request in this process: what the client asked for, what it has been given, and the two ways it may end early."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from uuid import UUID

import numpy as np

from services.router.frames import Enough, Inbox, Piece
from shared.contracts.commands import SamplingSpec, TokenFrame
from shared.contracts.events import Finish, RequestCompleted
from shared.contracts.ids import BlockId, RequestId, TenantId, WorkerId
from shared.model.blocks import Tokens

UNREAD_TOKENS_MAX = 4_096
"""A client that is this far behind its own answer does not read it: it is treated as gone."""

EndReason = Literal[
    "too-long",
    "no-worker",
    "overloaded",
    "rate-limited",
    "slo",
    "shutdown",
    "attempts-exhausted",
    "lost-stream",
    "client-left",
    "internal",
]


class Unserved(Exception):
    """The request ends without (the rest of) its answer."""

    def __init__(self, reason: EndReason, detail: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.reason: EndReason = reason
        self.retry_after_s = retry_after_s


class Rejected(Unserved):
    """The request was received and rejected: its end is in the record."""


class NotReceived(Unserved):
    """Refused before it was received: there is no record of the request itself."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks for, checked and tokenised. `arrived_ns` is monotonic; what is None is the tenant's to say."""

    request: RequestId
    tenant: TenantId
    model: str
    tokens: Tokens
    chain: tuple[BlockId, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: SamplingSpec
    stream: bool
    arrived_ns: int
    slo_us: int | None = None
    traceparent: str | None = None
    client_digest: str | None = None
    hard_slo: bool | None = None
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)


class Served(NamedTuple):
    """Who gave the first token, and how. `decision` is the event id of that assignment; times as the agent measured."""

    decision: UUID
    worker: WorkerId
    first: TokenFrame
    ttft_us: int


class Slot:
    """One place among the open requests. Given back once, however often it is released."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


@dataclass(slots=True)
class Call:
    """The writer is the request's driver in `dispatch.py`; the reader is one HTTP handler."""

    order: Order
    inbox: Inbox
    slot: Slot
    generated: list[int] = field(default_factory=list)
    served: Served | None = None
    last_token_ns: int = 0
    held_us: int = 0
    finish: Finish | None = None
    failure: Unserved | None = None
    driver: "asyncio.Task[None] | None" = None
    shut_down: bool = False
    is_enough: bool = False
    _unread: deque[Piece] = field(default_factory=deque)
    _unread_tokens: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request(self) -> RequestId:
        return self.order.request

    # --- the driver's side

    @property
    def prompt(self) -> Tokens:
        """The prompt and what was generated behind it: what another worker would have to prefill."""
        return np.concatenate([self.order.tokens, np.asarray(self.generated, dtype=np.uint32)])

    @property
    def tokens_left(self) -> int:
        return self.order.max_tokens - len(self.generated)

    @property
    def sampling(self) -> SamplingSpec:
        """For the rest of the answer: tokens that were generated count towards `min_tokens`."""
        asked = self.order.sampling
        if not asked.min_tokens or not self.generated:
            return asked
        return asked.model_copy(update={"min_tokens": max(0, asked.min_tokens - len(self.generated))})

    def give(self, piece: Piece) -> bool:
        """False if the client is too far behind."""
        self.generated += piece.tokens
        self._unread.append(piece)
        self._unread_tokens += len(piece.tokens)
        self._changed.set()
        return self._unread_tokens <= UNREAD_TOKENS_MAX

    @property
    def is_closed(self) -> bool:
        return self.finish is not None or self.failure is not None

    def close(self, end: Finish | Unserved) -> None:
        """No piece follows."""
        if isinstance(end, Unserved):
            self.failure = end
        else:
            self.finish = end
        self._changed.set()

    def completed(self, finish: Finish) -> RequestCompleted:
        """How it went, from its arrival to the last token."""
        assert self.served is not None, "a request completes with a token"
        first, ttft_us = self.served.first, self.served.ttft_us
        known_us = self.held_us + first.queue_us + first.fetch_us + first.prefill_us
        later_ns = self.last_token_ns - self.order.arrived_ns - ttft_us * 1_000
        return RequestCompleted(
            request=self.request,
            worker=self.served.worker,
            ttft_us=ttft_us,
            held_us=self.held_us,
            queue_us=first.queue_us,
            fetch_us=first.fetch_us,
            prefill_us=first.prefill_us,
            handoff_us=max(0, ttft_us - known_us),
            tpot_us=later_ns // 1_000 // max(1, len(self.generated) - 1),
            output_tokens=len(self.generated),
            cached_tokens=first.cached_tokens,
            finish=finish,
        )

    # --- the reader's side

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece until the end. Errors: Unserved, behind what was given before."""
        while True:
            while self._unread:
                piece = self._unread.popleft()
                self._unread_tokens -= len(piece.tokens)
                yield piece
            if self.failure is not None:
                raise self.failure
            if self.finish is not None:
                return
            self._changed.clear()
            await self._changed.wait()

    def enough(self) -> None:
        """The answer is complete before the engine knows: the rest is cancelled, the request has ended well."""
        self.is_enough = True
        self.inbox.put(Enough())

    def leave(self) -> None:
        """The client is gone. Harmless after the end, and when it had enough."""
        if self.driver is not None and not self.is_enough:
            self.driver.cancel()
