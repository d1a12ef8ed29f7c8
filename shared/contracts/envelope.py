"""The form in which every fact is published, and how a class becomes an event type.

An event type is one pydantic class per (type, version), registered by an explicit tag: the tag is stored for ever, the class
may be renamed. Fields that this version does not know are kept. A changed event gets a new version and an upcaster
(`shared.contracts.upcasts`); golden files of every version stay in `tests/contracts/golden`.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from shared.contracts.ids import Source


class Channel(StrEnum):
    """The part of the stream an event is published on: one subject, or one per source or node (`subjects.py`)."""

    REQUESTS = "requests"
    CACHE = "cache"
    WORKERS = "workers"
    CONTROL = "control"
    CACHE_CONTROL = "cache-control"
    LEDGER = "ledger"


class EventData(BaseModel):
    """What one event says. Frozen; durations are integer microseconds; bytes travel as base64.

    Numbers are finite: JSON has no infinity, and what was written instead could not be read.
    """

    model_config = ConfigDict(
        frozen=True, extra="allow", allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
    )

    TYPE: ClassVar[str]
    VERSION: ClassVar[int]
    CHANNEL: ClassVar[Channel]
    SENDERS: ClassVar[tuple[str, ...]]


class UnknownEvent(EventData):
    """An event of a type or version this process does not know. It is recorded and folded by nobody."""

    TYPE: ClassVar[str] = "unknown"
    VERSION: ClassVar[int] = 0


class Envelope(BaseModel):
    """One event as published.

    `source_seq` is gap-free per source, from 1. `correlation` is what the event belongs to (a request, a node's epoch, a
    scan), `causation` the event that led to it. `time_ns` is the sender's wall clock.
    """

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_bytes="base64", val_json_bytes="base64")

    id: UUID
    type: str
    version: int = Field(ge=1)
    pool: str
    source: Source
    source_seq: int = Field(ge=1)
    time_ns: int
    correlation: str | None = None
    causation: UUID | None = None
    traceparent: str | None = None
    data: SerializeAsAny[EventData]


class Stored(NamedTuple):
    """An event at its place in the log. `log` names the stream's incarnation, `stream_seq` the place in it, from 1.

    An event that its own process has decided and not yet seen stored has `stream_seq` 0, and so has one that an earlier log
    told. `kept` ones come from next to the log, which has dropped them and what was between them (`shared.model.keepsake`).
    """

    log: str
    stream_seq: int
    event: Envelope
    kept: bool = False

    @property
    def data(self) -> EventData:
        return self.event.data


EVENT_TYPES: dict[tuple[str, int], type[EventData]] = {}
"""Filled by `event` at import time and never afterwards; `shared.contracts.events` imports every module of events."""

E = TypeVar("E", bound=type[EventData])


def event(tag: str, *, version: int = 1, channel: Channel, senders: tuple[str, ...]) -> Callable[[E], E]:
    """Register a class as the event `tag` (kebab-case, past tense), published on `channel` by `senders`."""

    def register(cls: E) -> E:
        assert (tag, version) not in EVENT_TYPES, f"event {tag} v{version} is registered twice"
        cls.TYPE, cls.VERSION, cls.CHANNEL, cls.SENDERS = tag, version, channel, senders
        EVENT_TYPES[tag, version] = cls
        return cls

    return register


def latest_versions() -> dict[str, type[EventData]]:
    """The newest class of each event type, by tag."""
    newest: dict[str, type[EventData]] = {}
    for (tag, version), cls in EVENT_TYPES.items():
        if tag not in newest or version > newest[tag].VERSION:
            newest[tag] = cls
    return newest


Json = dict[str, Any]
