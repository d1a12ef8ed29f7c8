"""Copies and evictions in virtual time: real slots and leases in the nodes' KV indexes, and the time that the bytes take.

An order is obeyed as an agent does: its source's blocks are lent, room is taken, and after the time of the transfer the blocks
that are still there are installed and reported.
"""

from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from services.worker import cache_events
from services.worker.engine.copy_plan import Copied
from services.worker.engine.modelled_copies import LATENCY_S
from services.worker.engine.protocol import EngineError
from shared.contracts.copy_commands import Copy, Evict
from shared.contracts.ids import BlockId, NodeId, node_of, unpack_block_ids
from simulation.policies.agenda import Agenda
from simulation.policies.node import Node
from simulation.policies.setup import Setup


class Copies:
    """`carry` once per operation; `told` is why it cannot be, by operation."""

    def __init__(self, setup: Setup, agenda: Agenda, nodes: Mapping[NodeId, Node]) -> None:
        self.told: dict[str, str] = {}
        self._block_s = setup.block_tokens * setup.kv_bytes_per_token / setup.link_bytes_per_s
        self._agenda = agenda
        self._nodes = nodes
        self._begun: set[str] = set()

    def carry(self, orders: Mapping[str, Copy | Evict]) -> None:
        """Begin what was not begun; forget what nobody asks for any longer."""
        self._begun &= orders.keys()
        for name in self.told.keys() - orders.keys():
            del self.told[name]
        for name, order in orders.items():
            if name not in self._begun:
                self._begun.add(name)
                why_not = self._copy(order) if isinstance(order, Copy) else self._evict(order)
                if why_not is not None:
                    self.told[name] = why_not

    def _copy(self, order: Copy) -> str | None:
        source, destination = self._nodes[node_of(order.source)], self._nodes[node_of(order.destination)]
        group, blocks = destination.steps.groups.get(order.destination), unpack_block_ids(order.block_ids)
        if group is None:
            return "stale-epoch"
        lease = f"{destination.state.node}/{order.operation}"
        lent = source.steps.pool.copies.lend(lease, blocks)
        here = len(list(takewhile(lambda ref: ref is not None, lent)))
        parent = None if order.parent is None else BlockId(order.parent)
        try:
            coming = destination.steps.pool.copies.install(order.operation, group, parent, blocks[:here])
        except EngineError as error:
            source.steps.pool.copies.end_lease(lease)
            return type(error).__name__
        seconds = LATENCY_S + len(coming.blocks) * self._block_s
        self._agenda.after(seconds, partial(self._arrived, order, len(coming.blocks), seconds))
        return None

    def _arrived(self, order: Copy, blocks: int, seconds: float) -> None:
        source, destination = self._nodes[node_of(order.source)], self._nodes[node_of(order.destination)]
        source.steps.pool.copies.end_lease(f"{destination.state.node}/{order.operation}")
        pool = destination.steps.pool
        void = pool.copies.is_void(order.operation)
        installed = pool.copies.finish(order.operation, blocks)
        if void:
            self.told[order.operation] = "stale-epoch"
            return
        group = destination.steps.groups[order.destination]
        copied = Copied(
            parent=installed.parent,
            blocks=installed.blocks,
            first_depth=installed.first_depth,
            bytes=0,
            seconds=seconds,
            evicted=pool.take_evicted(group),
        )
        number = destination.state.numbers.get(order.destination, 0)
        incarnation = destination.state.incarnation
        destination.say(cache_events.copied(order.destination, incarnation, number, "replication", copied))

    def _evict(self, order: Evict) -> str | None:
        node = self._nodes[node_of(order.worker)]
        group = node.steps.groups.get(order.worker)
        if group is None:
            return "stale-epoch"
        gone = node.steps.pool.copies.evict(group, unpack_block_ids(order.block_ids))
        number = node.state.numbers.get(order.worker, 0)
        node.say(cache_events.evictions(order.worker, node.state.incarnation, number, gone.freed, "reclaim"))
        return None if gone.freed else next(iter(sorted({reason for _, reason in gone.kept})), "nothing-held")
