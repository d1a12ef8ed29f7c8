"""A prefill that goes on at another node: this side offers its KV, and asks until the other has come to the end.

    take-over ──waiting──▶ renew … ──decoding──▶ kv-handed-off, the pins end ──▶ renew … ──ended──▶ the job ends
       └── refused, or no answer ──▶ the router is told that the attempt broke off, and places the request again

The job stays this node's: whoever cancels it, or finds this node lost, need not know where it is decoded. Tokens go from
there to the router without passing here. A node that decodes ends what nobody renews.
"""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from services.worker.engine.protocol import Engine, EngineError, HandedOff
from services.worker.job import Job
from services.worker.ports import NodePorts
from shared.contracts.commands import Cancel, Refused, Renew, Reply, TakenOver, TakeOver, decode_reply, encode_message
from shared.contracts.copy_commands import PinnedSlot
from shared.contracts.ids import NodeId, node_of
from shared.contracts.message import Message
from shared.model.cost import US_PER_S
from shared.runtime.ports import NoReply, Unavailable

RENEW_S = 1.0
"""Between two questions: a tenth of the lease."""

REPLY_LIMIT_S = 3.0
TRIES_MAX = 3
"""Nine seconds in all, less than the lease: when this side gives up, the other has done so or will at once."""


class Elsewhere:
    """One per incarnation. `serving` says whether it lives, `spawn` begins what ends with it at the latest."""

    def __init__(
        self,
        ports: NodePorts,
        engine: Engine,
        serving: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.ports, self.engine = ports, engine
        self._serving, self._spawn = serving, spawn
        self._logger = structlog.get_logger(component="elsewhere", node=ports.node)

    @asynccontextmanager
    async def takes_over(self, job: Job, first_token: int) -> AsyncIterator["Taken"]:
        """Who leaves before the end calls it off there."""
        assert job.assign.decode_worker is not None, "only a job with a decode worker is handed off"
        node = node_of(job.assign.decode_worker)
        taken = Taken(self, job, first_token, node)
        try:
            yield taken
        finally:
            if not taken.over and self._serving():
                self._spawn(self._cancel(job, node), f"call off {job.key.engine_id}")

    async def _cancel(self, job: Job, node: NodeId) -> None:
        """Once. If it is lost, the lease ends it."""
        command = Cancel(request=job.assign.request, attempt=job.assign.attempt)
        try:
            await self.ports.bus.publish(self.ports.subjects.agent(node), encode_message(command))
        except Unavailable as error:
            self._logger.info("not called off", request=job.assign.request, error=str(error))

    async def ask(self, node: NodeId, command: Message) -> Reply:
        """Errors: EngineError if the node gives no answer, or one that is none."""
        subject, why = self.ports.subjects.agent(node), ""
        for _ in range(TRIES_MAX):
            try:
                return decode_reply(await self.ports.bus.request(subject, encode_message(command), REPLY_LIMIT_S))
            except (NoReply, Unavailable, ValueError) as error:
                # Of ValueErrors: an answer that is none, and a prompt of more slots than a message can name.
                why = f"{type(error).__name__}: {error}"
        raise EngineError(f"{node} does not answer ({why[:200]})")


class Taken:
    """One request at `node`, in the order of the module's picture."""

    def __init__(self, elsewhere: Elsewhere, job: Job, first_token: int, node: NodeId) -> None:
        self._elsewhere, self._job, self._first_token, self._node = elsewhere, job, first_token, node
        self.over = False

    async def handed_off(self) -> HandedOff:
        """Returns when the KV is there. Errors: EngineError, EngineDied."""
        stage = await self._ask(await self._take_over())
        while stage.stage == "waiting":
            stage = await self._renewed()
        return HandedOff(self._job.key.engine_id, stage.bytes, stage.handoff_us / US_PER_S)

    async def ended(self) -> None:
        """Returns when nothing more comes. Errors: EngineError."""
        while not self.over:
            await self._renewed()

    async def _take_over(self) -> TakeOver:
        offered = await self._elsewhere.engine.offer(self._job.key.engine_id)
        slots = [
            PinnedSlot(
                rank=each.slot.rank, index=each.slot.index, generation=each.slot.generation, checksum=each.checksum
            )
            for each in offered.sources
            if each is not None
        ]
        return TakeOver(
            sender=self._elsewhere.ports.node,
            assign=self._job.assign.model_copy(update={"block_ids": b"", "fetch_from": None, "fetch_blocks": 0}),
            first_token=self._first_token,
            slots=tuple(slots),
            access=offered.access,
        )

    async def _renewed(self) -> TakenOver:
        await self._elsewhere.ports.clock.sleep(RENEW_S)
        return await self._ask(Renew(request=self._job.assign.request, attempt=self._job.assign.attempt))

    async def _ask(self, command: TakeOver | Renew) -> TakenOver:
        reply = await self._elsewhere.ask(self._node, command)
        if isinstance(reply, Refused):
            self.over = True
            raise EngineError(f"{self._node} does not decode it: {reply.reason}: {reply.detail}")
        if not isinstance(reply, TakenOver):
            raise EngineError(f"{self._node}: {reply.kind} is no answer to {command.kind}")
        self.over = reply.stage == "ended"
        return reply
