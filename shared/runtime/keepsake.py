"""The record that holds what is kept of dropped events (`shared.model.keepsake`): one small value next to the log.

Compressed JSON: which log it speaks of, how far that had been folded, and the events as published with their sequences.
"""

import zlib
from typing import Any, NamedTuple

import orjson

from shared.contracts.codec import decode, encode
from shared.contracts.envelope import Stored
from shared.model.keepsake import LASTING, Keepsake
from shared.runtime.ports import Cell

FORMAT = 1

RECORD_BYTES_MAX = 1_000_000
"""What a server takes in one message. A node with 8 ranks takes 0.4 KB."""

UNREADABLE = (zlib.error, ValueError, LookupError, TypeError)
"""What bytes that were not packed here can raise; BadEvent is a ValueError."""


class BadKeepsake(Exception):
    """The record cannot be read. Starting without it could use an incarnation's or an epoch's number twice."""


class Recalled(NamedTuple):
    """Kept events in their order, complete up to `seen_seq` of this log."""

    seen_seq: int
    events: tuple[Stored, ...]


NOTHING = Recalled(0, ())


def pack(keepsake: Keepsake, log: str) -> bytes:
    """The record. ValueError if it is larger than `RECORD_BYTES_MAX`."""
    events = [[stored.stream_seq, orjson.Fragment(encode(stored.event))] for stored in keepsake.kept.values()]
    record = {"format": FORMAT, "log": log, "seen_seq": keepsake.seen_seq, "events": events}
    packed = zlib.compress(orjson.dumps(record))
    if len(packed) > RECORD_BYTES_MAX:
        raise ValueError(f"keepsake: {len(packed)} bytes for {len(events)} events; it has at most {RECORD_BYTES_MAX}")
    return packed


def unpack(packed: bytes, log: str) -> Recalled:
    """The record as a reader of `log` has to take it. Errors: BadKeepsake.

    Of another log, which was lost or recreated, only what outlives a log is taken, as of before the first event of this one.
    An empty record is one that an operator has deleted.
    """
    if not packed:
        return NOTHING
    try:
        record = _record(packed)
        events = tuple(Stored(log, seq, decode(orjson.dumps(event)), kept=True) for seq, event in record["events"])
        if record["log"] == log:
            return Recalled(int(record["seen_seq"]), events)
    except UNREADABLE as error:
        raise BadKeepsake(f"the keepsake of the log cannot be read: {error}") from error
    return Recalled(0, tuple(each._replace(stream_seq=0) for each in events if isinstance(each.data, LASTING)))


def is_newer(packed: bytes, log: str, seen_seq: int) -> bool:
    """Whether a record speaks of `log` and has seen more of it. Errors: BadKeepsake."""
    if not packed:
        return False
    try:
        record = _record(packed)
        return bool(record["log"] == log and record["seen_seq"] > seen_seq)
    except UNREADABLE as error:
        raise BadKeepsake(f"the keepsake of the log cannot be read: {error}") from error


async def recall(cell: Cell, log: str) -> Recalled:
    """What is kept for a reader of `log`. Errors: Unavailable; BadKeepsake."""
    found = await cell.read()
    return unpack(found[1], log) if found else NOTHING


def _record(packed: bytes) -> dict[str, Any]:
    record: dict[str, Any] = orjson.loads(zlib.decompress(packed))
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']}; this version knows {FORMAT}")
    return record
