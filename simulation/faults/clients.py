"""Clients: each has one request, takes tokens until it has its answer or has had enough, and knows what the answer must be.

They stand where the router's HTTP handlers stand: `enter`, `submit`, read the call's pieces, leave when the client has left.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np

from services.router.calls import Call, NotReceived, Order, Unserved
from services.router.dispatch import Dispatcher
from services.worker.engine.modelled_text import Said
from services.worker.engine.protocol import Sampling
from shared.contracts.commands import SamplingSpec
from shared.contracts.ids import RequestId, TenantId
from shared.model.blocks import Tokens, block_chain, block_key
from simulation.faults.process import Process
from simulation.faults.roles import BLOCK_TOKENS, NOT_A_SECRET, VOCABULARY
from simulation.faults.scenario import Request

TRIES_S_MAX = 40.0
"""How long a client that is refused asks again."""

DOCUMENT_BLOCKS = 3

REJECTIONS = ("no-worker", "too-long", "rate-limited", "overloaded", "slo")

Outcome = Literal["waiting", "served", "failed", "rejected", "refused", "left", "broken"]
"""broken: its router ended while it waited. refused: never received. left: by its own will."""


class WrongToken(Exception):
    """A client was given something else than the next token of its answer."""


@dataclass(slots=True)
class Client:
    """One request and what became of it. `sources` are the router processes it was given to, under an id for each."""

    name: str
    asked: Request
    tokens: Tokens
    answer: tuple[int, ...]
    stop_tokens: tuple[int, ...]
    given: list[int] = field(default_factory=list)
    outcome: Outcome = "waiting"
    reason: str = ""
    request: RequestId = field(default_factory=lambda: RequestId(""))
    source: str = ""

    async def live(self, find: Callable[[float], "tuple[Process, Dispatcher] | None"]) -> None:
        """Ask until somebody takes the request; then wait for what becomes of it. Errors: WrongToken."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + TRIES_S_MAX
        for attempt in range(1_000):
            found = find((self.asked.router + 0.37 * attempt) % 1)
            if found is not None and await self._try(*found, attempt):
                return
            if loop.time() > give_up_s:
                break
            await asyncio.sleep(0.5)
        self.outcome, self.reason = "refused", "nobody took it"

    async def _try(self, process: Process, dispatcher: Dispatcher, attempt: int) -> bool:
        """False if it may ask again."""
        self.request, self.source = RequestId(f"{self.name}-{attempt}"), process.source
        reading = asyncio.ensure_future(self._read(dispatcher, process))
        broken = asyncio.ensure_future(process.died.wait())
        await asyncio.wait([reading, broken], return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if reading.done():
            return reading.result()
        reading.cancel()
        self.outcome = "broken"
        return True

    async def _read(self, dispatcher: Dispatcher, process: Process) -> bool:
        try:
            slot = dispatcher.enter()
            try:
                call = await dispatcher.submit(self._order(process), slot)
            except BaseException:
                slot.release()
                raise
            self.outcome = await self._take(call)
        except NotReceived:
            return False
        except Unserved as error:
            known = error.reason in REJECTIONS and not self.given
            self.outcome, self.reason = ("rejected" if known else "failed"), error.reason
        return True

    async def _take(self, call: Call) -> Outcome:
        """Errors: Unserved; WrongToken."""
        asked = self.asked
        pieces = call.pieces()
        while True:
            if asked.leaves_after is not None and len(self.given) >= asked.leaves_after:
                call.leave()
                return "left"
            try:
                async with asyncio.timeout(asked.patience_s):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                break
            except TimeoutError:
                call.leave()
                return "left"
            self._check(piece.tokens)
            if asked.enough_after is not None and len(self.given) >= asked.enough_after:
                call.enough()
                return "served"
        if tuple(self.given) != self.answer:
            raise WrongToken(f"{self.name}: the answer ends after {len(self.given)} of {len(self.answer)} tokens")
        return "served"

    def _check(self, tokens: tuple[int, ...]) -> None:
        begin = len(self.given)
        self.given += tokens
        if self.answer[begin : len(self.given)] != tokens:
            expected = self.answer[begin : begin + len(tokens)]
            raise WrongToken(f"{self.name}: tokens from number {begin} on are {tokens} instead of {expected}")

    def _order(self, process: Process) -> Order:
        asked, tenant = self.asked, TenantId(self.asked.tenant)
        return Order(
            request=self.request,
            tenant=tenant,
            model="modelled",
            tokens=self.tokens,
            chain=tuple(block_chain(self.tokens, BLOCK_TOKENS, block_key(NOT_A_SECRET.read_bytes(), tenant))),
            max_tokens=asked.max_tokens,
            stop_tokens=self.stop_tokens,
            sampling=_sampling(asked),
            stream=True,
            arrived_ns=process.clock.monotonic_ns(),
        )


def client(name: str, asked: Request, *, decodes: bool) -> Client:
    """A client with its prompt and the answer that a modelled engine gives, whoever computes it. A pool that does not decode
    gives one token."""
    tokens = _prompt(name, asked)
    sampling = Sampling(temperature=1.0 if asked.sampled else 0.0, seed=asked.tail_tokens)
    said = Said.of(tokens)
    answer: list[int] = []
    for _ in range(asked.max_tokens if decodes else 1):
        answer.append(said.next(sampling, VOCABULARY).token)
        said.say(answer[-1])
    stop_tokens = (answer[len(answer) // 2],) if asked.stops else ()
    ends = next((index + 1 for index, token in enumerate(answer) if token in stop_tokens), len(answer))
    return Client(name, asked, tokens, tuple(answer[:ends]), stop_tokens)


def _sampling(asked: Request) -> SamplingSpec:
    return SamplingSpec(temperature=1.0 if asked.sampled else 0.0, seed=asked.tail_tokens)


def _prompt(name: str, asked: Request) -> Tokens:
    """Documents that others may have sent before, in the same order, and a tail of its own."""
    tokens: list[int] = []
    path = ""
    for document in asked.documents:
        path += f"/{document}"
        chance = Random(path)
        tokens += [chance.randrange(1_000, VOCABULARY) for _ in range(DOCUMENT_BLOCKS * BLOCK_TOKENS)]
    chance = Random(name)
    tokens += [chance.randrange(1_000, VOCABULARY) for _ in range(asked.tail_tokens)]
    return np.asarray(tokens, dtype=np.uint32)
