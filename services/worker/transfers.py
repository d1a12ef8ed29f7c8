"""Blocks that come from other workers: ask each source's node to pin, make the plan, let the engine copy, record what came.

An order of the cache manager and the fetch before a prefill differ in who asks and why, and are the same here.
"""

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import structlog
from pydantic import ValidationError

from services.worker import cache_events
from services.worker.cache_events import CopyCause
from services.worker.engine import copy_plan
from services.worker.engine.copy_plan import CopyPlan, Source
from services.worker.engine.protocol import Busy, Engine, EngineDied, EngineError, OutOfBlocks, StaleEpoch
from services.worker.engine.slot_ref import SlotRef
from services.worker.ports import NodePorts
from shared.contracts.commands import Refused, Reply, decode_reply, encode_message
from shared.contracts.copy_commands import Copied, Pin, Pinned, Unpin
from shared.contracts.ids import BlockId, NodeId, WorkerId
from shared.model.cost import US_PER_S
from shared.runtime.appending import Origin
from shared.runtime.ports import NoReply, Unavailable

COPY_LEASE_S = 30.0
"""How long blocks stay pinned for a reader that does not say that it is done, and the longest that a copy may take."""

PIN_LIMIT_S = 2.0


class Transfer(NamedTuple):
    """`blocks`, a path below `parent` (None for the root), are to come to `worker`, each from the first of `sources` that has
    it. `limit_s` is for all of it."""

    operation: str
    worker: WorkerId
    parent: BlockId | None
    blocks: Sequence[BlockId]
    sources: tuple[NodeId, ...]
    limit_s: float
    cause: CopyCause
    origin: Origin


class Transfers:
    """One per incarnation. `serving` says whether it lives, `spawn` begins what ends with it at the latest."""

    def __init__(
        self,
        ports: NodePorts,
        engine: Engine,
        serving: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._ports, self._state, self._engine = ports, ports.state, engine
        self._serving, self._spawn = serving, spawn
        self._logger = structlog.get_logger(component="transfers", node=ports.node)

    async def bring(self, transfer: Transfer) -> Copied | Refused:
        """Whoever leaves calls the copy off."""
        group = self._state.served.workers(self._ports.node).get(transfer.worker)
        if group is None:
            return Refused(reason="stale-epoch", detail=f"{transfer.worker}: the geometry has changed")
        epoch, began_ns = self._state.served.epoch, self._ports.clock.monotonic_ns()
        try:
            sources, access = await self._gather(transfer)
            left_s = transfer.limit_s - (self._ports.clock.monotonic_ns() - began_ns) / 1e9
            if not sources or left_s <= 0:
                return Copied(blocks=0, bytes=0, copy_us=0, failure="no-source" if left_s > 0 else "time-limit")
            plan = CopyPlan(
                operation=transfer.operation,
                epoch=epoch,
                group=group,
                parent=transfer.parent,
                blocks=tuple(transfer.blocks[: len(sources)]),
                sources=sources,
                limit_s=left_s,
                access=access,
            )
            return await self._carry_out(transfer, plan)
        except (EngineError, ValueError) as error:  # what others say of their blocks may be no plan
            return Refused(reason="engine", detail=str(error))
        finally:
            self._let_go(transfer.operation, transfer.sources)

    async def _carry_out(self, transfer: Transfer, plan: CopyPlan) -> Copied | Refused:
        try:
            copy = await self._engine.copy_blocks(plan, partial(self._note, transfer, plan.epoch))
        except OutOfBlocks as error:
            return Refused(reason="full", detail=str(error))
        except Busy as error:
            return Refused(reason="busy", detail=str(error))
        except StaleEpoch as error:
            return Refused(reason="stale-epoch", detail=str(error))
        except EngineDied:
            raise
        except EngineError as error:
            return Refused(reason="bad-command", detail=str(error))
        if not self._serves(plan.epoch):
            return Refused(reason="stale-epoch", detail=f"epoch {plan.epoch}: was left during the copy")
        failure = copy.failure or (None if len(plan.blocks) == len(transfer.blocks) else "no-source")
        self._logger.info("copied", operation=transfer.operation, blocks=len(copy.blocks), failure=failure)
        return Copied(
            blocks=len(copy.blocks),
            bytes=copy.bytes,
            copy_us=round(copy.seconds * US_PER_S),
            failure=failure,
            detail=copy.detail,
        )

    def _note(self, transfer: Transfer, epoch: int, copy: copy_plan.Copied) -> None:
        """See `protocol`, rule 8. Of a copy that was overtaken by a switch nothing is left."""
        if self._serves(epoch):
            number = self._state.numbers.get(transfer.worker, 0)
            facts = cache_events.copied(transfer.worker, self._state.incarnation, number, transfer.cause, copy)
            self._ports.outbox.record(facts, transfer.origin)

    def _serves(self, epoch: int) -> bool:
        return self._serving() and self._state.served.epoch == epoch

    # --- what others lend

    async def _gather(self, transfer: Transfer) -> tuple[tuple[Source, ...], dict[NodeId, bytes]]:
        """A source for each leading block that somebody has, pinned, and how the nodes among them are reached."""
        blocks, found, access = transfer.blocks, dict[BlockId, Source](), dict[NodeId, bytes]()
        for node in transfer.sources:
            missing = [block for block in blocks if block not in found]
            if missing and (pinned := await self._pinned(transfer, node, missing)) is not None:
                sources, access[node] = pinned
                found.update((block, each) for block, each in zip(missing, sources, strict=True) if each is not None)
        access.pop(self._ports.node, None)
        leading = next((depth for depth, block in enumerate(blocks) if block not in found), len(blocks))
        return tuple(found[block] for block in blocks[:leading]), access

    async def _pinned(
        self, transfer: Transfer, node: NodeId, blocks: Sequence[BlockId]
    ) -> tuple[tuple[Source | None, ...], bytes] | None:
        if node == self._ports.node:
            here = await self._engine.pin(transfer.operation, blocks)
            return here.sources, here.access
        command = Pin(reader=self._ports.node, operation=transfer.operation, block_ids=b"".join(blocks))
        reply = await self._ask(node, command, min(PIN_LIMIT_S, transfer.limit_s))
        if not isinstance(reply, Pinned) or len(reply.slots) != len(blocks):
            self._logger.warning("source not pinned", operation=transfer.operation, source=node, reply=str(reply)[:200])
            return None
        sources = (
            None if slot is None else Source(SlotRef(slot.rank, slot.index, slot.generation), node, slot.checksum)
            for slot in reply.slots
        )
        return tuple(sources), reply.access

    def _let_go(self, operation: str, nodes: Sequence[NodeId]) -> None:
        """Nobody waits for the others' answer; what a dead life leaves pinned elsewhere, its lease ends."""
        for node in nodes:
            if node == self._ports.node:
                self._engine.unpin(operation)
            elif self._serving():
                self._spawn(self._unpin(operation, node), f"unpin {operation}")

    async def _unpin(self, operation: str, node: NodeId) -> None:
        await self._ask(node, Unpin(reader=self._ports.node, operation=operation), PIN_LIMIT_S)

    async def _ask(self, node: NodeId, command: Pin | Unpin, limit_s: float) -> Reply | None:
        """None if the node does not answer: what it has pinned, its lease ends."""
        try:
            raw = await self._ports.bus.request(self._ports.subjects.agent(node), encode_message(command), limit_s)
        except (NoReply, Unavailable) as error:
            self._logger.warning("source not reachable", source=node, asked=command.kind, error=str(error))
            return None
        try:
            return decode_reply(raw)
        except ValidationError as error:
            self._logger.warning("source not understood", source=node, asked=command.kind, error=str(error))
            return None
