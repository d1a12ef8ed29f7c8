"""What a published message is as a row: which table, which columns, and its link in that table's chain of hashes.

Whatever was published gets a row. Bytes that are no event, or whose columns Postgres could not hold, are `unreadable`: they
are kept whole, under their place in the stream, and folded by nobody.
"""

from datetime import date
from hashlib import blake2b
from typing import Any, Literal, NamedTuple
from uuid import UUID

import orjson
from pydantic import ValidationError

from shared.contracts.codec import BadEvent, decode_as_sent
from shared.contracts.envelope import Envelope
from shared.contracts.events import BlocksEvicted, BlocksStored, CacheReported

UNREADABLE = "unreadable"
KEY_CHARS_MAX = 256
"""Longer names are not ours, and an index of Postgres could not hold them."""

BIGINT_MAX = 2**63 - 1
INTEGER_MAX = 2**31 - 1
_DAY_NS = 86_400 * 10**9
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()

LogTable = Literal["decisions", "block_events", "repeats"]
LOG_TABLES: tuple[LogTable, ...] = ("decisions", "block_events", "repeats")

BLOCK_EVENT_TYPES = frozenset(each.TYPE for each in (BlocksStored, BlocksEvicted, CacheReported))
"""What is kept by the day. Everything else is a decision, or the outcome of one, and is kept for ever."""

CHAIN_ORIGIN = bytes(32)


class Arrival(NamedTuple):
    """One message as the stream delivered it."""

    stream_seq: int
    raw: bytes


class Record(NamedTuple):
    """One row. All of `id` to `causation` but `type` and `version` are None for unreadable bytes.

    `event` is what the folds see, None for what they must not: unreadable bytes and known events with wrong fields.
    """

    stream_seq: int
    raw: bytes
    type: str = UNREADABLE
    version: int = 0
    id: UUID | None = None
    pool: str | None = None
    source: str | None = None
    source_seq: int | None = None
    time_ns: int | None = None
    correlation: str | None = None
    causation: UUID | None = None
    event: Envelope | None = None

    @property
    def table(self) -> LogTable:
        """Where the row belongs, unless it is a repeat."""
        return "block_events" if self.type in BLOCK_EVENT_TYPES else "decisions"

    @property
    def day(self) -> date:
        """The UTC day of the sender's clock."""
        assert self.time_ns is not None, "only readable events have a day"
        return date.fromordinal(_EPOCH_ORDINAL + self.time_ns // _DAY_NS)


def record(arrival: Arrival) -> Record:
    """The row of a message. Never fails: that is the point."""
    seq, raw = arrival
    if b"\\u0000" in raw:
        # Postgres has no NUL in its text types; no service of ours writes one.
        return Record(seq, raw)
    try:
        event, sent_version = decode_as_sent(raw)
    except BadEvent:
        return _without_event(seq, raw)
    # The envelope's version is the newest one; the row says which was published.
    return _with_columns(seq, raw, sent_version, event, event)


def link(head: bytes, raw: bytes) -> bytes:
    """The chain's next head: it depends on every row before, byte for byte and in order."""
    return blake2b(head + raw, digest_size=32).digest()


def digest(raw: bytes) -> bytes:
    """What the checkpoint keeps of the last message, to recognise a stream that was put back to an older state."""
    return blake2b(raw, digest_size=32).digest()


def _without_event(seq: int, raw: bytes) -> Record:
    """A known event with wrong fields still has its envelope, and so its place among its source's events."""
    try:
        fields: Any = orjson.loads(raw)
        envelope = Envelope.model_validate({**fields, "data": {}})
    except (orjson.JSONDecodeError, TypeError, ValidationError):
        return Record(seq, raw)
    return _with_columns(seq, raw, envelope.version, envelope, None)


def _with_columns(seq: int, raw: bytes, version: int, envelope: Envelope, event: Envelope | None) -> Record:
    names = (envelope.type, envelope.pool, envelope.source, envelope.correlation or "")
    fits = (
        max(map(len, names)) <= KEY_CHARS_MAX
        and version <= INTEGER_MAX
        and envelope.source_seq <= BIGINT_MAX
        and abs(envelope.time_ns) <= BIGINT_MAX
    )
    if not fits:
        return Record(seq, raw)
    return Record(
        seq,
        raw,
        envelope.type,
        version,
        envelope.id,
        envelope.pool,
        envelope.source,
        envelope.source_seq,
        envelope.time_ns,
        envelope.correlation,
        envelope.causation,
        event,
    )
