"""Commands about the blocks that workers hold, and their answers: copy, evict, pin, unpin. Part of `commands`."""

from typing import Literal

from pydantic import Field

from shared.contracts.ids import NodeId, WorkerId
from shared.contracts.message import Message, Number, SomeWorkers, Text

COPY_BLOCKS_MAX = 4_096
"""Blocks of one command; at 64 tokens a block the prefix of a prompt of 262,144 tokens."""


HAND_OFF_BLOCKS_MAX = 1 << 18
"""Blocks of one prompt that is handed off: a context of 2^20 tokens in blocks of 4. What goes over the bus is bounded by the
size of a message as well."""

FETCHES_PER_SOURCE_MAX = 2
"""Prefixes that are read from one node for prefills at a time: routers price by it, agents keep to it."""


class Copy(Message):
    """Read blocks of one path from other workers: `block_ids`, in order, below `parent` (None for the root), which the
    destination must hold. Each block comes from the first that has it of `source` and then `more_sources`. Idempotent by
    operation. Answers Copied when it is over, after `deadline_us` at the latest, or Refused."""

    kind: Literal["copy"] = "copy"
    term: Number
    operation: Text
    source: WorkerId
    destination: WorkerId
    parent: bytes | None = None
    block_ids: bytes
    deadline_us: Number
    more_sources: SomeWorkers = ()
    cause: Literal["replication", "reconciliation", "fetch"] = "replication"


class Pin(Message):
    """An agent asks another for blocks that it is about to read: keep what the node has of them where it is, until `unpin`
    or the end of the lease. `reader` is who asks. Idempotent by (reader, operation). Answers Pinned or Refused."""

    kind: Literal["pin"] = "pin"
    reader: NodeId
    operation: Text
    block_ids: bytes


class Unpin(Message):
    """End a `pin` early. Answers Accepted, also if there is none."""

    kind: Literal["unpin"] = "unpin"
    reader: NodeId
    operation: Text


class Evict(Message):
    """Remove a replica: leaf first, never a pinned block, never one with retained descendants. Idempotent by operation.
    Answers Evicted or Refused."""

    kind: Literal["evict"] = "evict"
    term: Number
    operation: Text
    worker: WorkerId
    block_ids: bytes


class Copied(Message):
    """What came of a `copy`: `blocks` are new at the destination, in the order that was asked for and without a gap. After a
    `failure` those that are missing may be asked for again, as another operation."""

    kind: Literal["copied"] = "copied"
    blocks: Number
    bytes: Number
    copy_us: Number
    failure: Text | None = None
    detail: str = ""


class Evicted(Message):
    """What came of an `evict`: ids of the blocks that left, children before parents, and how many stayed for which reason."""

    kind: Literal["evicted"] = "evicted"
    block_ids: bytes = b""
    kept: dict[Text, Number] = Field(default_factory=dict)


class PinnedSlot(Message):
    """Where a block lies: see the worker's `SlotRef`."""

    rank: Number
    index: Number
    generation: Number
    checksum: Number | None = None


class Pinned(Message):
    """What a node lends. `slots` has an entry per block that was asked for, None for what is not there; `access` tells an
    engine of the same kind how to read them."""

    kind: Literal["pinned"] = "pinned"
    slots: tuple[PinnedSlot | None, ...]
    access: bytes
