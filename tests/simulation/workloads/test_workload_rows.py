"""The file format: what is read is what was written, and a bad line is refused by number, field and limit."""

from io import BytesIO
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.workloads.files import read
from simulation.workloads.rows import BLOCK_TOKENS, LINE_BYTES_MAX, BadRow, Row, parsed, write

GOOD = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}


def line(**changes: object) -> bytes:
    return orjson.dumps(GOOD | changes) + b"\n"


def rows_of(*lines: bytes) -> list[Row]:
    return list(parsed(BytesIO(b"".join(lines))))


@st.composite
def traces(draw: st.DrawFn) -> list[Row]:
    arrivals = sorted(draw(st.lists(st.integers(0, 10**7), max_size=20)))
    rows = []
    for arrival_ms in arrivals:
        prompt_tokens = draw(st.integers(1, 5 * BLOCK_TOKENS))
        blocks = -(-prompt_tokens // BLOCK_TOKENS)
        hash_ids = draw(st.lists(st.integers(0, 2**63 - 1), min_size=blocks, max_size=blocks))
        rows.append(Row(arrival_ms, prompt_tokens, draw(st.integers(0, 4000)), tuple(hash_ids)))
    return rows


@given(traces())
def test_what_is_written_is_read_back(rows: list[Row]) -> None:
    file = BytesIO()
    assert write(rows, file) == len(rows)
    file.seek(0)
    assert list(parsed(file)) == rows


def test_a_file_is_read_one_row_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n" + line(timestamp=4000) + b"nonsense\n")
    rows = read(path)
    assert [next(rows).arrival_ms, next(rows).arrival_ms] == [3000, 4000]
    with pytest.raises(BadRow, match="line 4: "):
        next(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestamp": -1}, r"line 2: timestamp: -1 is no number in \[0, "),
        ({"timestamp": "3000"}, "line 2: timestamp: '3000' is no number"),
        ({"timestamp": None}, "line 2: timestamp: None is no number"),
        ({"timestamp": 2999}, "line 2: timestamp: 2999 is before the line above, 3000"),
        ({"input_length": 0}, r"line 2: input_length: 0 is no whole number in \[1, "),
        ({"input_length": 700.5}, "line 2: input_length: 700.5 is no whole number"),
        ({"input_length": 2**40}, "line 2: input_length: 1099511627776 is no whole number"),
        ({"output_length": True}, "line 2: output_length: True is no whole number"),
        ({"hash_ids": None}, "line 2: hash_ids: missing, or not a list"),
        ({"hash_ids": [1]}, "line 2: hash_ids: 1 ids for 700 tokens; must be 2, one per 512 tokens"),
        ({"hash_ids": [1, -2]}, r"line 2: hash_ids: -2 is no whole number in \[0, "),
        ({"hash_ids": [1, "2"]}, "line 2: hash_ids: '2' is no whole number"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        rows_of(line(), line(**changes))


@pytest.mark.parametrize("bad", [b"[]\n", b"{\n", b'{"timestamp": NaN}\n', b"\xff\n"])
def test_what_is_no_object_is_refused(bad: bytes) -> None:
    with pytest.raises(BadRow, match="line 1: "):
        rows_of(bad)


def test_an_endless_line_is_refused_before_it_is_held() -> None:
    with pytest.raises(BadRow, match=f"line 1: longer than {LINE_BYTES_MAX} bytes"):
        rows_of(b" " * (LINE_BYTES_MAX + 10))


def test_other_block_sizes_are_read_when_named() -> None:
    assert next(parsed(BytesIO(line(input_length=20)), 16)).block_tokens == 16
    with pytest.raises(BadRow, match="must be 44, one per 16 tokens"):
        list(parsed(BytesIO(line()), 16))
