"""Orders to agents: copies and evictions that the log asks for, one request at a time for each, until it is settled.

What an agent answers counts only as a reason why not; that it was done says the log. A new leader knows no answers and asks
again: agents do an operation once.
"""

import asyncio
from collections.abc import Mapping

import structlog
from pydantic import ValidationError

from services.cachemgr.replication import COPY_S_MAX
from shared.contracts.commands import Refused, Reply, decode_reply, encode_message
from shared.contracts.copy_commands import Copied, Copy, Evict, Evicted
from shared.contracts.ids import node_of
from shared.contracts.subjects import Subjects
from shared.runtime.clock import Clock
from shared.runtime.ports import Bus, NoReply, Unavailable

ANSWER_LIMIT_S = COPY_S_MAX + 1.0
AGAIN_S = 1.0
"""Before an agent that was busy, or silent, is asked again."""

LATER = frozenset({"busy", "stale-term"})
"""Refusals that say nothing against the operation: the next leader, or the next second, may do it."""


class Carrier:
    """`told` is why agents could not carry out an operation, by its name."""

    def __init__(self, bus: Bus, subjects: Subjects, clock: Clock) -> None:
        self.told: dict[str, str] = {}
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._logger = structlog.get_logger(component="carrying")

    def carry(self, orders: Mapping[str, Copy | Evict]) -> None:
        """Ask for each operation that is not being asked for; forget those that are settled. Raises what an asking has raised:
        nobody asks for that operation any more, and nobody would hear of it."""
        for task in self._asking.values():
            if task.done():
                task.result()
        for name in self.told.keys() - orders.keys():
            del self.told[name]
        for name in self._asking.keys() - orders.keys():
            self._asking.pop(name).cancel()
        for name, order in orders.items():
            if name not in self._asking and name not in self.told:
                self._asking[name] = asyncio.create_task(self._ask(name, order), name=name)

    async def stop(self) -> None:
        """Ask no more. What is under way at the agents goes on."""
        for task in self._asking.values():
            task.cancel()
        self._asking.clear()

    async def _ask(self, name: str, order: Copy | Evict) -> None:
        node = node_of(order.destination if isinstance(order, Copy) else order.worker)
        while True:
            try:
                raw = await self._bus.request(self._subjects.agent(node), encode_message(order), ANSWER_LIMIT_S)
                why_not = reason(decode_reply(raw))
            except (NoReply, Unavailable, ValidationError) as error:
                self._logger.warning("no answer", operation=name, node=node, error=str(error))
                why_not = None
            if why_not is not None and why_not not in LATER:
                self.told[name] = why_not
                return
            await self._clock.sleep(AGAIN_S)


def reason(reply: Reply) -> str | None:
    """Why an operation cannot be; None if it was done, and the log will say so."""
    match reply:
        case Refused():
            return reply.reason
        case Copied():
            return reply.failure
        case Evicted():
            return None if reply.block_ids else next(iter(sorted(reply.kept)), "nothing-held")
        case _:
            return f"answered {reply.kind}"
