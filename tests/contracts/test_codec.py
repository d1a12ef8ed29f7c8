"""Envelopes survive the bytes; bad bytes are named."""

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ValidationError

from shared.contracts.codec import EVENT_BYTES_MAX, BadEvent, decode, encode
from shared.contracts.envelope import Envelope, UnknownEvent
from shared.contracts.events import ParametersChanged, RequestReceived, RouterRegistered, WindowClosed
from shared.contracts.ids import Source
from tests.contracts.examples import ALL, example

TEXT = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def values(annotation: Any, limits: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Any value a field may hold."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    least = max([0, *(each.ge for each in limits if isinstance(each, Ge))])
    above = any(isinstance(each, Gt) for each in limits)
    packed = any(isinstance(each, AfterValidator) for each in limits)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(each, limits) for each in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return models(annotation)
    plain: Any = getattr(annotation, "__supertype__", annotation)
    return {
        type(None): st.none(),
        str: TEXT,
        bytes: st.binary(max_size=40).map(lambda raw: raw[: len(raw) // 16 * 16] if packed else raw),
        bool: st.booleans(),
        int: st.integers(least, 2**53),
        float: st.floats(least, 1e9, exclude_min=above, allow_nan=False),
        Any: JSON,
    }[plain]


def models(cls: type[BaseModel]) -> st.SearchStrategy[Any]:
    fields = {name: values(field.annotation, tuple(field.metadata)) for name, field in cls.model_fields.items()}
    return st.builds(cls, **fields)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    _, cls = draw(st.sampled_from(ALL))
    return Envelope(
        id=draw(st.uuids()),
        type=cls.TYPE,
        version=cls.VERSION,
        pool=draw(TEXT),
        source=Source(draw(TEXT)),
        source_seq=draw(st.integers(1, 2**53)),
        time_ns=draw(st.integers(0, 2**62)),
        correlation=draw(st.none() | TEXT),
        causation=draw(st.none() | st.uuids()),
        traceparent=draw(st.none() | TEXT),
        data=draw(models(cls)),
    )


@given(envelopes())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_what_is_encoded_is_decoded_and_encodes_to_the_same_bytes(event: Envelope) -> None:
    raw = encode(event)
    assert decode(raw) == event
    assert encode(decode(raw)) == raw


def test_none_and_defaults_in_the_data_are_written() -> None:
    """What a default is may change; what was recorded may not."""
    window = example(WindowClosed).data.model_copy(update={"attainment": None, "signals": ()})
    event = example(WindowClosed).model_copy(update={"data": window})
    assert json.loads(encode(event))["data"].items() >= {"attainment": None, "signals": []}.items()
    assert decode(encode(event)) == event


def test_none_in_free_form_data_is_kept() -> None:
    change = ParametersChanged(parameters_version=1, changes={"a": None}, asked_by="ops")
    event = example(ParametersChanged).model_copy(update={"data": change})
    assert decode(encode(event)) == event


def test_an_unknown_type_or_version_is_kept_as_it_is() -> None:
    for change in ({"type": "thing-happened"}, {"version": 9}):
        fields = {**json.loads(encode(example(RouterRegistered))), **change}
        fields["data"] = {"router": "r1", "more": {"b": [1, None, 2.5]}, "bytes": "AAEC", "nothing": None}
        raw = json.dumps(fields, separators=(",", ":")).encode()
        event = decode(raw)
        assert isinstance(event.data, UnknownEvent)
        assert (event.type, event.version) == (fields["type"], fields["version"])
        assert encode(event) == raw


def test_unknown_fields_are_kept() -> None:
    fields = json.loads(encode(example(RouterRegistered)))
    fields |= {"signature": "abc", "data": {**fields["data"], "zone": "eu"}}
    event = decode(json.dumps(fields).encode())
    assert isinstance(event.data, RouterRegistered)
    assert json.loads(encode(event)) == fields


def test_bytes_travel_as_base64() -> None:
    event = example(RequestReceived)
    assert json.loads(encode(event))["data"]["known_block"] == "a25vd25fYmxvY2suLi4uLg=="


RECEIVED = json.loads(encode(example(RequestReceived)))["data"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": "not-a-uuid"}, "id:"),
        ({"id": 7}, "id:"),
        ({"type": None}, "type: str needed, got NoneType"),
        ({"type": ["a"]}, "type: str needed, got list"),
        ({"version": "1"}, "version: int needed, got str"),
        ({"version": 0}, "version:"),
        ({"source_seq": 0}, "source_seq:"),
        ({"time_ns": "soon"}, "time_ns:"),
        ({"causation": "x"}, "causation:"),
        ({"data": []}, "data: dict needed, got list"),
        ({"data": {"prompt_tokens": 0}}, "data."),
        ({"data": {**RECEIVED, "block_ids": "AAEC"}}, "data.block_ids: "),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    fields = {**json.loads(encode(example(RequestReceived))), **change}
    with pytest.raises(BadEvent) as error:
        decode(json.dumps(fields).encode())
    assert str(error.value).startswith(named)


@pytest.mark.parametrize("missing", ["id", "type", "version", "pool", "source", "source_seq", "time_ns", "data"])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = json.loads(encode(example(RequestReceived)))
    del fields[missing]
    with pytest.raises(BadEvent, match=f"^{missing}: "):
        decode(json.dumps(fields).encode())


def test_a_wrong_field_deep_in_the_data_is_named_without_its_value() -> None:
    fields = json.loads(encode(example(WindowClosed)))
    fields["data"]["persistence"] = {"split": "a secret"}
    with pytest.raises(BadEvent) as error:
        decode(json.dumps(fields).encode())
    assert str(error.value).startswith("data.persistence.split: ")
    assert "secret" not in str(error.value)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_a_bad_event_and_nothing_worse(raw: bytes) -> None:
    with pytest.raises(BadEvent):
        decode(raw)


def test_an_event_that_is_too_large_is_refused_with_its_limit() -> None:
    data = RequestReceived(**{**example(RequestReceived).data.model_dump(), "block_ids": bytes(EVENT_BYTES_MAX)})
    with pytest.raises(BadEvent, match=f"request-received: .* at most {EVENT_BYTES_MAX}"):
        encode(example(RequestReceived).model_copy(update={"data": data}))


def test_a_number_that_json_cannot_hold_is_refused_when_it_is_made() -> None:
    fields = example(WindowClosed).data.model_dump()
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="attainment"):
            WindowClosed(**{**fields, "attainment": number})
