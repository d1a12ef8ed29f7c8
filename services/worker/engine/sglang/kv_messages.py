"""SGLang's KV events as they come over ZMQ: three frames, topic, sequence number and a msgpack batch (0.5.23,
`disaggregation/kv_events.py`). Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.worker.engine.sglang.page_hashes import PageHash

END_OF_REPLAY = -1
"""The sequence number that ends a replay."""

SEQUENCE_BYTES = 8
DEVICE = (None, "GPU")
"""Media that count as held: what lies in host memory or further off is loaded before it is used."""


class BadMessage(ValueError):
    """What came is no KV event message of this version: its content is lost, as if it had never come."""


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Pages of one path became resident, first page first, below `parent_block_hash` (None for the root)."""

    block_hashes: list[PageHash]
    parent_block_hash: PageHash | None = None
    block_size: int = 0
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Pages left a medium."""

    block_hashes: list[PageHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """The cache is empty. What a merge of units has kept follows in the same message."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[Event]


class Message(NamedTuple):
    """One batch; `sequence` counts the batches of one publisher from 0 without a gap."""

    sequence: int
    events: list[Event]


_DECODER = msgspec.msgpack.Decoder(_Batch)


def parse(frames: Sequence[bytes]) -> Message:
    """A message of the subscription or, without its topic, of a replay. The last of a replay has no events.

    Errors: BadMessage.
    """
    if not 2 <= len(frames) <= 3 or len(frames[-2]) != SEQUENCE_BYTES:
        raise BadMessage(f"{len(frames)} frames of {[len(frame) for frame in frames]} bytes")
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    if sequence == END_OF_REPLAY:
        return Message(sequence, [])
    try:
        return Message(sequence, _DECODER.decode(frames[-1]).events)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"batch {sequence}: {error}") from None
