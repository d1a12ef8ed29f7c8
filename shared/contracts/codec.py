"""Envelopes to bytes and back. JSON, so that a record can be read with any tool in twenty years."""

from typing import Any

import orjson
from pydantic import ValidationError

# Importing the catalogue is what fills EVENT_TYPES: whoever decodes knows every event.
import shared.contracts.events  # noqa: F401
from shared.contracts.envelope import EVENT_TYPES, Envelope, EventData, UnknownEvent
from shared.contracts.upcasts import upcast

EVENT_BYTES_MAX = 1_000_000
"""An event that is larger is refused before it is published; the NATS server's limit is a little above."""

_OMITTED_WHEN_NONE = ("correlation", "causation", "traceparent")


class BadEvent(ValueError):
    """The bytes are no event of ours. The message names the field, and never repeats what was in it."""


def encode(envelope: Envelope) -> bytes:
    """The published bytes. BadEvent if they exceed `EVENT_BYTES_MAX`.

    Every field of the data is written, also where it has its default: an old record means the same under new code.
    """
    omitted = {name for name in _OMITTED_WHEN_NONE if getattr(envelope, name) is None}
    raw = envelope.model_dump_json(exclude=omitted).encode()
    if len(raw) > EVENT_BYTES_MAX:
        raise BadEvent(f"{envelope.type}: {len(raw)} bytes; an event has at most {EVENT_BYTES_MAX}")
    return raw


def decode(raw: bytes) -> Envelope:
    """The envelope in `raw`, its data upcast to the newest version known here.

    An unknown type or version decodes to `UnknownEvent` with every field kept. BadEvent if the bytes are not an envelope or
    a known event breaks its own schema.
    """
    fields = _object(raw)
    tag, sent_version, sent_data = (_required(fields, name, kind) for name, kind in _NEEDED_FIRST)
    version, data = upcast(tag, sent_version, sent_data)
    cls = EVENT_TYPES.get((tag, version), UnknownEvent)
    try:
        return Envelope.model_validate({**fields, "version": version, "data": _data(cls, data)})
    except ValidationError as error:
        raise BadEvent(_first(error)) from None


_NEEDED_FIRST = (("type", str), ("version", int), ("data", dict))
"""What says which class the data has, with the JSON type each must be of."""


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadEvent(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadEvent(f"not an object but {type(fields).__name__}")
    return fields


def _required(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind):
        found = type(value).__name__ if name in fields else "nothing"
        raise BadEvent(f"{name}: {kind.__name__} needed, got {found}")
    return value


def _data(cls: type[EventData], fields: dict[str, Any]) -> EventData:
    # As JSON again, not as the dict: only there does base64 become bytes.
    try:
        return cls.model_validate_json(orjson.dumps(fields))
    except ValidationError as error:
        raise BadEvent(f"data.{_first(error)}") from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
