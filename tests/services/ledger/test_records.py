from datetime import date

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ledger_traffic import Told
from services.ledger.records import UNREADABLE, Arrival, record
from shared.contracts.events import BlocksEvicted, RouterRegistered
from shared.contracts.ids import RouterId, WorkerId
from tests.services.ledger.conftest import Seals

REGISTERED = Told("router", RouterRegistered(router=RouterId("r1")), "c")


def fields_of(seals: Seals) -> dict[str, object]:
    return orjson.loads(seals.arrivals([REGISTERED])[0].raw)


def test_an_event_has_its_columns_and_is_folded(seals: Seals) -> None:
    found = record(seals.arrivals([REGISTERED])[0])
    assert (found.type, found.version, found.source, found.source_seq) == ("router-registered", 1, "router-1-0", 1)
    assert (found.pool, found.correlation, found.table) == ("main", "c", "decisions")
    assert found.event is not None
    assert found.event.data == REGISTERED.fact


def test_block_events_are_kept_by_the_utc_day_of_their_sender(seals: Seals) -> None:
    evicted = BlocksEvicted(worker=WorkerId("n0/1/0"), incarnation=1, number=1, cause="pressure", block_ids=b"")
    found = record(seals.arrivals([Told("worker", evicted)])[0])
    assert found.table == "block_events"
    assert found.day == date(2027, 1, 15)


def test_an_unknown_type_is_a_row_with_all_its_columns(seals: Seals) -> None:
    raw = orjson.dumps(fields_of(seals) | {"type": "from-the-future", "version": 7})
    found = record(Arrival(1, raw))
    assert (found.type, found.version, found.source_seq) == ("from-the-future", 7, 1)
    assert found.table == "decisions"


def test_a_known_event_with_a_wrong_field_keeps_its_place_and_is_not_folded(seals: Seals) -> None:
    raw = orjson.dumps(fields_of(seals) | {"data": {"router": 7}})
    found = record(Arrival(1, raw))
    assert (found.type, found.source_seq, found.event) == ("router-registered", 1, None)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "a\0b"},
        {"source": "x" * 257},
        {"correlation": "x" * 257},
        {"source_seq": 2**63},
        {"source_seq": 0},
        {"time_ns": 2**63},
        {"version": 2**31},
        {"id": "no-uuid"},
        {"id": 7},
        {"type": ["a"]},
    ],
)
def test_what_postgres_cannot_hold_is_kept_as_bytes(seals: Seals, change: dict[str, object]) -> None:
    raw = orjson.dumps(fields_of(seals) | change)
    found = record(Arrival(5, raw))
    assert found.type == UNREADABLE
    assert found == (5, raw, UNREADABLE, 0, *[None] * 8)


@pytest.mark.parametrize("number", [2**63, -(2**63), 2**64 - 1, 10**40])
@pytest.mark.parametrize("separator", ["", " "])
def test_numbers_beyond_64_bits_are_not_folded(seals: Seals, number: int, separator: str) -> None:
    text = orjson.dumps(fields_of(seals)).decode().replace('"data":{', f'"data":{{"unknown":{separator}[{number}],')
    found = record(Arrival(1, text.encode()))
    assert found.event is None or abs(number) <= 2**63 - 1 or number >= 2**64, "only a float may pass"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_row(raw: bytes) -> None:
    assert record(Arrival(1, raw)).raw == raw


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_is_a_row(value: object) -> None:
    try:
        raw = orjson.dumps(value)
    except TypeError:
        return
    assert record(Arrival(1, raw)).raw == raw
