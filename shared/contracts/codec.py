"""Envelopes to bytes and back. JSON, so that a record can be read with any tool in twenty years."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson
from pydantic import ValidationError, create_model

# Importing the catalogue is what fills EVENT_TYPES: whoever decodes knows every event.
import shared.contracts.events  # noqa: F401
from shared.contracts.envelope import EVENT_TYPES, Envelope, EventData, UnknownEvent
from shared.contracts.subjects import channel_of
from shared.contracts.upcasts import upcast

EVENT_BYTES_MAX = 1_000_000
"""An event that is larger is refused before it is published; the NATS server's limit is a little above."""

_INT64_MAX = 2**63 - 1
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_WIDE = b"0" * 19
"""So many digits in a row, or more, may be a whole number of more than 64 bits: those are read as another number, or by no
reader and no database at all. Each event's own time has 19; of so many, only those that begin with a 9 are too large."""

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
    _check_width(raw)
    return raw


def decode(raw: bytes) -> Envelope:
    """The envelope in `raw`, its data upcast to the newest version known here.

    An unknown type or version decodes to `UnknownEvent` with every field kept. BadEvent if the bytes are not an envelope or
    a known event breaks its own schema.
    """
    return decode_as_sent(raw)[0]


def decode_as_sent(raw: bytes) -> tuple[Envelope, int]:
    """`decode`, and the version in which the event was sent."""
    fields = _object(raw)
    _check_width(raw)
    tag, sent_version, sent_data = fields.get("type"), fields.get("version"), fields.get("data")
    if not (isinstance(tag, str) and isinstance(sent_version, int) and isinstance(sent_data, dict)):
        raise BadEvent(_missing(fields))
    version, data = upcast(tag, sent_version, sent_data)
    if version != sent_version:
        raw = orjson.dumps({**fields, "version": version, "data": data})
    try:
        event = _reader(EVENT_TYPES.get((tag, version), UnknownEvent))(raw)
    except ValidationError as error:
        raise BadEvent(_first(error)) from None
    # What is read is an envelope like any other: equal ones are of one class.
    object.__setattr__(event, "__class__", Envelope)
    return event, sent_version


@cache
def _reader(data: type[EventData]) -> Callable[[bytes], Envelope]:
    """Reads an envelope around data of one class: all of it in one go, without a Python object for each part in between. It is
    the validator itself, which `model_validate_json` takes a fifth of the time to come to."""
    form: type[Envelope] = create_model(Envelope.__name__, __base__=Envelope, data=(data, ...))
    return form.__pydantic_validator__.validate_json


def decode_at(subject: str, raw: bytes) -> Envelope:
    """`decode`, and BadEvent for an event on a subject of another channel: what a service may say is decided by where its
    NATS user may publish (deploy/nats/nats.conf), and that means nothing unless readers look."""
    event = decode(raw)
    if not isinstance(event.data, UnknownEvent) and channel_of(subject) != event.data.CHANNEL:
        raise BadEvent(f"type: {event.type} has no place on this subject, but on those of {event.data.CHANNEL}")
    return event


def _check_width(raw: bytes) -> None:
    digits = raw.translate(_DIGITS)
    at = digits.find(_WIDE)
    while at >= 0:
        end = at + len(_WIDE)
        if raw.startswith(b"9", at) or digits.startswith(b"0", end):
            try:
                wide = _has_wide_number(json.loads(raw))
            except RecursionError:
                raise BadEvent("nested too deeply") from None
            if wide:
                raise BadEvent("a whole number has more than 64 bits")
            return
        at = digits.find(_WIDE, end)


def _has_wide_number(value: Any) -> bool:
    match value:
        case int():
            return abs(value) > _INT64_MAX
        case dict():
            return any(map(_has_wide_number, value.values()))
        case list():
            return any(map(_has_wide_number, value))
        case _:
            return False


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


def _missing(fields: dict[str, Any]) -> str:
    """The first of what is needed and is not there, or is of another JSON type."""
    for name, kind in _NEEDED_FIRST:
        if not isinstance(value := fields.get(name), kind):
            break
    return f"{name}: {kind.__name__} needed, got {type(value).__name__ if name in fields else 'nothing'}"


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
