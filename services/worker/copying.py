"""Blocks that come from other workers, are lent to other nodes, or are to go: what `copy`, `evict`, `pin` and `unpin` do.

    copy     see `transfers` · answered when it is over
    pin      lend what the node has for `COPY_LEASE_S`, even if the reader is never heard of again
    evict    the engine removes what may go · `blocks-evicted`

1.  A copy or an eviction is done once per operation: a repetition waits for the first and gets its answer, until
    `ANSWERS_MAX` others have been answered since.
2.  A copy ends within a lease, so nobody reads what is lent no longer; if somebody did, generations would tell.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from services.worker import cache_events
from services.worker.engine.protocol import EngineError
from services.worker.incarnation import Incarnation
from services.worker.origins import of_operation
from services.worker.transfers import COPY_LEASE_S, Transfer
from shared.contracts.commands import Accepted, Refused, Reply
from shared.contracts.copy_commands import COPY_BLOCKS_MAX, Copy, Evict, Evicted, Pin, Pinned, PinnedSlot, Unpin
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, WorkerId, node_of, unpack_block_ids
from shared.model.cost import US_PER_S
from shared.model.lattice import Group

LEASES_MAX = 64
"""Leases that a node has given at a time; each may pin a whole prompt."""

COPIES_MAX = 8
"""Copies that a node takes in at a time. Two share a link as well as eight do."""

ANSWERS_MAX = 1_000


class Copying:
    """One per incarnation."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._ports, self._state, self._engine = incarnation.ports, incarnation.state, incarnation.engine
        self._answers: OrderedDict[str, asyncio.Future[Reply]] = OrderedDict()
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._copies = 0
        self._logger = structlog.get_logger(component="copying", node=self._ports.node)

    # --- orders of the cache manager

    async def copy(self, command: Copy) -> Reply:
        """See `Copy`."""
        return await self._once(command, lambda blocks: self._copy(command, blocks))

    async def evict(self, command: Evict) -> Reply:
        """See `Evict`."""
        return await self._once(command, lambda blocks: self._evict(command, blocks))

    async def _once(
        self, command: Copy | Evict, work: Callable[[Sequence[BlockId]], Coroutine[Any, Any, Reply]]
    ) -> Reply:
        known = self._answers.get(command.operation)
        if known is None:
            worker = command.destination if isinstance(command, Copy) else command.worker
            if (refusal := self._refusal(command.term, worker)) is not None:
                return refusal
            blocks = _block_ids(command.block_ids)
            if isinstance(blocks, Refused):
                return blocks
            self._state.term = command.term
            known = self._answers[command.operation] = asyncio.ensure_future(work(blocks))
            if len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
        reply = await asyncio.shield(known)
        if isinstance(reply, Refused):
            self._answers.pop(command.operation, None)  # nothing was done, so it may be asked for again
        return reply

    def _refusal(self, term: int, worker: WorkerId) -> Refused | None:
        if term < self._state.term:
            return Refused(reason="stale-term", detail=f"term: {term} is below {self._state.term}")
        if worker not in self._served():
            ours = node_of(worker) == self._ports.node and bool(self._state.served.epoch)
            reason = "stale-epoch" if ours else "unknown-worker"
            return Refused(reason=reason, detail=f"{worker} is none of {list(self._served())}")
        return None

    async def _copy(self, command: Copy, blocks: Sequence[BlockId]) -> Reply:
        if self._copies >= COPIES_MAX or not self._ports.outbox.ready:
            return Refused(reason="busy", detail=f"{self._copies} copies run, of at most {COPIES_MAX}")
        if command.parent is not None and len(command.parent) != BLOCK_ID_BYTES:
            return Refused(
                reason="bad-command", detail=f"parent: {len(command.parent)} bytes; an id has {BLOCK_ID_BYTES}"
            )
        transfer = Transfer(
            operation=command.operation,
            worker=command.destination,
            parent=None if command.parent is None else BlockId(command.parent),
            blocks=blocks,
            sources=tuple(dict.fromkeys(map(node_of, (command.source, *command.more_sources)))),
            limit_s=min(command.deadline_us / US_PER_S, COPY_LEASE_S),
            cause=command.cause,
            origin=of_operation(command.operation),
        )
        self._copies += 1
        try:
            return await self._incarnation.transfers.bring(transfer)
        finally:
            self._copies -= 1

    async def _evict(self, command: Evict, blocks: Sequence[BlockId]) -> Reply:
        if not self._ports.outbox.ready:
            return Refused(reason="busy", detail="the log does not acknowledge events")
        group = self._served().get(command.worker)
        if group is None:
            return Refused(reason="stale-epoch", detail=f"{command.worker}: the geometry has changed")
        try:
            gone = await self._engine.evict(group, blocks)
        except EngineError as error:
            return Refused(reason="engine", detail=str(error))
        number = self._state.numbers.get(command.worker, 0)
        facts = cache_events.reclaimed(command.worker, self._state.incarnation, number, gone)
        self._ports.outbox.record(facts, of_operation(command.operation))
        return Evicted(block_ids=b"".join(gone.freed), kept=dict(Counter(reason for _, reason in gone.kept)))

    # --- what is lent to others

    async def pin(self, command: Pin) -> Reply:
        """See `Pin`."""
        lease = f"{command.reader}/{command.operation}"
        blocks = _block_ids(command.block_ids)
        if isinstance(blocks, Refused):
            return blocks
        if lease not in self._leases and len(self._leases) >= LEASES_MAX:
            return Refused(reason="full", detail=f"{LEASES_MAX} leases are open")
        if lease not in self._leases:
            self._leases[lease] = self._incarnation.spawn(self._end_lease_in_time(lease), f"lease {lease}")
        try:
            lent = await self._engine.pin(lease, blocks)
        except EngineError as error:
            self._end_lease_now(lease)
            return Refused(reason="engine", detail=str(error))
        slots = tuple(
            None
            if each is None
            else PinnedSlot(
                rank=each.slot.rank, index=each.slot.index, generation=each.slot.generation, checksum=each.checksum
            )
            for each in lent.sources
        )
        return Pinned(slots=slots, access=lent.access)

    def unpin(self, command: Unpin) -> Accepted:
        """See `Unpin`."""
        self._end_lease_now(f"{command.reader}/{command.operation}")
        return Accepted()

    def _end_lease_now(self, lease: str) -> None:
        if lease in self._leases:
            self._leases[lease].cancel()
            self._end_lease(lease)

    async def _end_lease_in_time(self, lease: str) -> None:
        await self._ports.clock.sleep(COPY_LEASE_S)
        self._logger.warning("lease ran out", lease=lease)
        self._end_lease(lease)

    def _end_lease(self, lease: str) -> None:
        del self._leases[lease]
        self._engine.unpin(lease)

    def _served(self) -> dict[WorkerId, Group]:
        return self._state.served.workers(self._ports.node)


def _block_ids(packed: bytes) -> Sequence[BlockId] | Refused:
    try:
        blocks = unpack_block_ids(packed)
    except ValueError as error:
        return Refused(reason="bad-command", detail=str(error))
    if not 1 <= len(blocks) <= COPY_BLOCKS_MAX:
        return Refused(
            reason="bad-command", detail=f"block_ids: {len(blocks)} ids; a command has 1 to {COPY_BLOCKS_MAX}"
        )
    return blocks
