"""Envelopes survive the bytes; bad bytes are named."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contracts.codec import EVENT_BYTES_MAX, BadEvent, decode, decode_at, encode
from shared.contracts.envelope import EVENT_TYPES, Envelope, UnknownEvent
from shared.contracts.events import EpochCommitted, ParametersChanged, RequestReceived, RouterRegistered, WindowClosed
from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from tests.contracts.examples import ALL, example
from tests.contracts.strategies import ANY_ID, JSON, NAMES, TEXT, Values


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    _, cls = draw(st.sampled_from(ALL))
    return Envelope(
        id=draw(st.uuids()),
        type=cls.TYPE,
        version=cls.VERSION,
        pool=draw(TEXT),
        source=Source(draw(NAMES)),
        source_seq=draw(st.integers(1, 2**53)),
        time_ns=draw(st.integers(0, 2**62)),
        correlation=draw(st.none() | TEXT),
        causation=draw(st.none() | st.uuids()),
        traceparent=draw(st.none() | TEXT),
        data=draw(Values(ANY_ID).models(cls)),
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


NODE = json.loads(encode(example(EVENT_TYPES["node-registered", 1])))
STORED = json.loads(encode(example(EVENT_TYPES["blocks-stored", 1])))
COMMIT = json.loads(encode(example(EpochCommitted)))


@pytest.mark.parametrize(
    ("event", "change", "named"),
    [
        (NODE, {"prefill_ranks": 2**31}, "data.prefill_ranks: "),
        (NODE, {"decode_ranks": 65}, "data.decode_ranks: "),
        (NODE, {"block_tokens": 0}, "data.block_tokens: "),
        (NODE, {"composition": [2, 1, 2]}, "data.composition: "),
        (NODE, {"node": "a/b"}, "data.node: "),
        (STORED, {"first_depth": -7}, "data.first_depth: "),
        (COMMIT, {"composition": [8, 8]}, "data: "),
        (COMMIT, {"composition": [2**31]}, "data.composition: "),
        (COMMIT, {"epoch": 5}, "data: "),
        (COMMIT, {"workers": []}, "data: "),
        (COMMIT, {"workers": [{**COMMIT["data"]["workers"][0], "worker": "nonsense"}]}, "data.workers.0.worker: "),
    ],
)
def test_what_no_fold_could_take_is_refused_when_it_is_read(
    event: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadEvent) as error:
        decode(json.dumps({**event, "data": {**event["data"], **change}}).encode())
    assert str(error.value).startswith(named)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_a_number_that_no_database_takes_is_neither_written_nor_read(number: int) -> None:
    event = example(RequestReceived)
    wide = event.model_copy(update={"data": event.data.model_copy(update={"slo_us": number})})
    with pytest.raises(BadEvent, match="64 bits"):
        encode(wide)
    raw = encode(event).replace(b'"slo_us":7', b'"slo_us":%d' % number)
    with pytest.raises(BadEvent, match="64 bits"):
        decode(raw)


@pytest.mark.parametrize("depth", [300, 1_000, 20_000])
@pytest.mark.parametrize("inmost", [b"12345678901234567890", b'"12345678901234567890"'])
def test_what_is_nested_too_deeply_is_a_bad_event(depth: int, inmost: bytes) -> None:
    nested = b"[" * depth + inmost + b"]" * depth
    with pytest.raises(BadEvent):
        decode(encode(example(RequestReceived))[:-1] + b',"more":' + nested + b"}")


def test_an_event_counts_on_the_subjects_of_its_channel_only() -> None:
    subjects = Subjects("main")
    for _, cls in ALL:
        event = example(cls)
        assert decode_at(subjects.event(cls.CHANNEL, "sender"), encode(event)) == event
    for subject in ("vertumnus.main.events.requests.router-1", "vertumnus.main.load.n0", "x"):
        with pytest.raises(BadEvent, match="type: epoch-committed has no place"):
            decode_at(subject, encode(example(EpochCommitted)))
    unknown = encode(example(EpochCommitted)).replace(b"epoch-committed", b"epoch-invented!")
    assert isinstance(decode_at("vertumnus.main.events.requests.router-1", unknown).data, UnknownEvent)
