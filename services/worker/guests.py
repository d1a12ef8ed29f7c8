"""Requests that other nodes have prefilled: their KV is read, and their tokens go from here to their routers.

A guest is no job: it was never assigned to this node, stands in no queue, and what it comes to is told to the node that sent
it, whose job it is (`elsewhere`). Rules:

1.  A `take-over` is done once per (request, attempt). Its answer, or that of a `renew`, says how far it is, also after its end,
    until `ANSWERS_MAX` others have ended.
2.  A guest that nobody has asked for in `TAKE_OVER_LEASE_S`, that was cancelled, or whose router is lost, ends.
3.  One whose KV does not come is refused: nothing of it was said to anybody. One that breaks off later is told to its router,
    which places it again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.worker.admission import bad_decode_worker
from services.worker.claims import Claims
from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.copy_plan import HandOffPlan, Source
from services.worker.engine.past import looks_back, past_of
from services.worker.engine.protocol import Engine, EngineDied, EngineError, HandedOff
from services.worker.engine.slot_ref import SlotRef
from services.worker.frames import Frames
from services.worker.job import JobKey
from services.worker.ports import NodePorts
from services.worker.speaking import Speaker, sampling_of
from services.worker.waiting import within
from shared.contracts.commands import TAKE_OVER_LEASE_S, Assign, Refused, Renew, TakenOver, TakeOver
from shared.contracts.ids import RequestId
from shared.model.cost import US_PER_S
from shared.runtime.ports import Unavailable

ANSWER_S = 1.0
"""How long an answer waits for the KV: most copies are done by then, and their source is free that much earlier."""

HAND_OFF_LIMIT_S = 30.0
"""For the copy alone. Its source keeps its pins as long as it asks."""

GUESTS_MAX = 1_024
ANSWERS_MAX = 1_000


@dataclass(slots=True, eq=False)
class Guest:
    """`handed_off` is the answer to be: what the copy took, or why it failed. `heard_ns` is monotonic."""

    command: TakeOver
    speaker: Speaker
    heard_ns: int
    handed_off: asyncio.Future[HandedOff]
    ended: bool = False
    task: asyncio.Task[None] | None = field(default=None)

    @property
    def key(self) -> JobKey:
        return JobKey(self.command.assign.request, self.command.assign.attempt)

    def answer(self) -> TakenOver | Refused:
        """How far it is."""
        if not self.handed_off.done():
            if self.ended:
                return Refused(reason="engine", detail="it was called off before its KV was here")
            return TakenOver(stage="waiting")
        if (error := self.handed_off.exception()) is not None:
            return Refused(reason="engine", detail=str(error))
        done = self.handed_off.result()
        stage = "ended" if self.ended else "decoding"
        return TakenOver(stage=stage, bytes=done.bytes, handoff_us=round(done.seconds * US_PER_S))


class Guests:
    """One per incarnation. `spawn` begins what ends with it at the latest; `died` is told when the engine turns out to be
    dead."""

    def __init__(
        self,
        ports: NodePorts,
        engine: Engine,
        frames: Frames,
        claims: Claims,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        died: Callable[[str], None],
    ) -> None:
        self._ports, self._engine, self._frames, self._claims = ports, engine, frames, claims
        self._spawn, self._died = spawn, died
        self._open: dict[JobKey, Guest] = {}
        # Answers alone: the slots of a long prompt are many.
        self._ended: OrderedDict[JobKey, TakenOver | Refused] = OrderedDict()
        self._logger = structlog.get_logger(component="guests", node=ports.node)

    def __len__(self) -> int:
        return len(self._open)

    def told(self) -> Iterator[tuple[Assign, int]]:
        """Every guest that decodes, and how many of its tokens were sent."""
        return ((guest.command.assign, guest.speaker.index) for guest in self._open.values() if guest.handed_off.done())

    # --- commands

    async def take_over(self, command: TakeOver) -> TakenOver | Refused:
        """See `TakeOver`."""
        known = self._known(JobKey(command.assign.request, command.assign.attempt))
        if known is None:
            if (refusal := self._refusal(command.assign)) is not None:
                return refusal
            known = self._begin(command)
        return await self._answered(known)

    async def renew(self, command: Renew) -> TakenOver | Refused:
        """See `Renew`."""
        known = self._known(JobKey(command.request, command.attempt))
        if known is None:
            detail = f"request {command.request}/{command.attempt}: is not decoded here"
            return Refused(reason="bad-command", detail=detail)
        return await self._answered(known)

    def cancel(self, request: RequestId, attempt: int) -> None:
        """End the attempts up to this one. Unknown requests are ignored."""
        for key, guest in tuple(self._open.items()):
            if key.request == request and key.attempt <= attempt:
                self._stop(guest)

    def lose_router(self, source: str) -> None:
        """Nobody waits for its requests any more."""
        for guest in tuple(self._open.values()):
            if guest.command.assign.router_source == source:
                self._stop(guest)

    # --- one guest

    def _known(self, key: JobKey) -> Guest | TakenOver | Refused | None:
        return self._open.get(key) or self._ended.get(key)

    def _refusal(self, assign: Assign) -> Refused | None:
        if len(self._open) >= GUESTS_MAX:
            return Refused(reason="full", detail=f"{GUESTS_MAX} requests of other nodes are here")
        if assign.router_source in self._ports.state.lost_routers:
            return Refused(reason="bad-command", detail=f"router_source: {assign.router_source} was declared lost")
        if assign.decode_worker is None:
            return Refused(reason="bad-command", detail="decode_worker: none is named")
        wrong = bad_decode_worker(self._ports.state, self._engine.describe(), assign.decode_worker)
        return None if wrong is None else Refused(reason="bad-command", detail=wrong)

    def _begin(self, command: TakeOver) -> Guest:
        speaker = Speaker(command.assign, self._frames, self._ports.clock, index=1)
        handed_off: asyncio.Future[HandedOff] = asyncio.get_running_loop().create_future()
        guest = Guest(command, speaker, self._ports.clock.monotonic_ns(), handed_off)
        self._open[guest.key] = guest
        name = guest.key.engine_id
        guest.task = self._spawn(self._serve(guest), f"guest {name}")
        lease = self._spawn(self._end_in_time(guest), f"lease of guest {name}")
        # A callback, because a task that is cancelled before it began runs no `finally`.
        guest.task.add_done_callback(lambda _: self._end(guest, lease))
        return guest

    async def _answered(self, guest: Guest | TakenOver | Refused) -> TakenOver | Refused:
        if not isinstance(guest, Guest):
            return guest
        guest.heard_ns = self._ports.clock.monotonic_ns()
        if not guest.handed_off.done() and not guest.ended:
            try:
                await within(self._ports.clock, ANSWER_S, self._handed_off(guest))
            except (TimeoutError, EngineError):
                return guest.answer()
        return guest.answer()

    @staticmethod
    async def _handed_off(guest: Guest) -> None:
        await asyncio.shield(guest.handed_off)

    async def _serve(self, guest: Guest) -> None:
        command, request = guest.command, guest.key.engine_id
        try:
            past, plan = await self._past(command.assign), _plan(command)
            guest.handed_off.set_result(await self._engine.hand_off(request, plan))
            await guest.speaker.decode(self._engine, request, command.first_token, past)
        except EngineDied as error:
            self._died(str(error))
        except (EngineError, ValueError) as error:
            self._logger.error("guest failed", request=command.assign.request, sender=command.sender, error=str(error))
            if guest.handed_off.done():
                await self._frames.broke_off(command.assign, "engine", guest.speaker.index)
            else:
                guest.handed_off.set_exception(EngineError(str(error)))
                guest.handed_off.exception()  # an answer reads it, if anybody still asks
        except Unavailable as error:
            self._logger.error("router not reachable", request=command.assign.request, error=str(error))

    async def _past(self, assign: Assign) -> Past:
        """Only penalties need the prompt here. Errors: EngineError if the router does not give it."""
        if not looks_back(sampling := sampling_of(assign)):
            return NO_PAST
        if (tokens := await self._claims.fetch(assign)) is None:
            raise EngineError(
                f"request {assign.request}: its router does not give the prompt that penalties look back at"
            )
        return past_of(tokens, assign.generated_tokens, sampling)

    async def _end_in_time(self, guest: Guest) -> None:
        clock = self._ports.clock
        while (left_ns := guest.heard_ns + round(TAKE_OVER_LEASE_S * 1e9) - clock.monotonic_ns()) > 0:
            await clock.sleep(left_ns / 1e9)
        self._logger.warning("lease ran out", request=guest.command.assign.request, sender=guest.command.sender)
        self._stop(guest)

    @staticmethod
    def _stop(guest: Guest) -> None:
        assert guest.task is not None, "a guest that is here has a task"
        guest.task.cancel()

    def _end(self, guest: Guest, lease: asyncio.Task[None]) -> None:
        """Nothing of it stays in the decode memory."""
        lease.cancel()
        guest.ended = True
        self._engine.cancel(guest.key.engine_id)
        del self._open[guest.key]
        self._ended[guest.key] = guest.answer()
        if len(self._ended) > ANSWERS_MAX:
            self._ended.popitem(last=False)


def _plan(command: TakeOver) -> HandOffPlan:
    """ValueError names the field and its limit."""
    sources = tuple(
        Source(SlotRef(slot.rank, slot.index, slot.generation), command.sender, slot.checksum) for slot in command.slots
    )
    return HandOffPlan(command.assign.prompt_tokens, sources, HAND_OFF_LIMIT_S, {command.sender: command.access})
