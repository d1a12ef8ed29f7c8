"""Envelopes to bytes and back. JSON, so that a record can be read with any tool in twenty years."""

from typing import Any
from uuid import UUID

import orjson

# Importing the catalogue is what fills EVENT_TYPES: whoever decodes knows every event.
import shared.contracts.events  # noqa: F401
from shared.contracts.envelope import EVENT_TYPES, Envelope, EventData, UnknownEvent
from shared.contracts.ids import Source
from shared.contracts.upcasts import upcast

EVENT_BYTES_MAX = 1_000_000
"""An event that is larger is refused before it is published; the NATS server's limit is a little above."""


class BadEvent(ValueError):
    """The bytes are no event of ours. The message names the field."""


def encode(envelope: Envelope) -> bytes:
    """The published bytes. BadEvent if they exceed `EVENT_BYTES_MAX`."""
    raw = envelope.model_dump_json(exclude_none=True).encode()
    if len(raw) > EVENT_BYTES_MAX:
        raise BadEvent(f"{envelope.type}: {len(raw)} bytes; an event has at most {EVENT_BYTES_MAX}")
    return raw


def decode(raw: bytes) -> Envelope:
    """The envelope in `raw`, its data upcast to the newest version known here.

    An unknown type or version decodes to `UnknownEvent` with every field kept. BadEvent if the bytes are not an envelope or
    a known event breaks its own schema.
    """
    try:
        fields: dict[str, Any] = orjson.loads(raw)
        tag, sent_version, sent_data = fields["type"], fields["version"], fields["data"]
        version, data = upcast(tag, sent_version, sent_data)
        cls = EVENT_TYPES.get((tag, version), UnknownEvent)
        return Envelope(
            id=UUID(fields["id"]),
            type=tag,
            version=version,
            pool=fields["pool"],
            source=Source(fields["source"]),
            source_seq=fields["source_seq"],
            time_ns=fields["time_ns"],
            correlation=fields.get("correlation"),
            causation=UUID(fields["causation"]) if "causation" in fields else None,
            traceparent=fields.get("traceparent"),
            data=_data(cls, data),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What orjson, UUID and pydantic raise over wrong values, all of them.
        raise BadEvent(f"not an event: {error}") from error


def _data(cls: type[EventData], fields: Any) -> EventData:
    if not isinstance(fields, dict):
        raise TypeError(f"data: an object is needed, got {type(fields).__name__}")
    return cls.model_validate_json(orjson.dumps(fields))
