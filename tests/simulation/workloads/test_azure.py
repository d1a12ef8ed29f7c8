"""Azure's CSV: instants become milliseconds since the first, blocks are nobody's, and a bad line is refused by name."""

from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.workloads.azure import parsed
from simulation.workloads.files import read
from simulation.workloads.rows import LINE_BYTES_MAX, BadRow, Row
from simulation.workloads.statistics import statistics
from tests.simulation.workloads.checking import check_rows

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = b"2023-11-16 18:15:46.6805900,374,44\n"


def rows_of(*lines: bytes, block_tokens: int = 512) -> list[Row]:
    return list(parsed(BytesIO(b"".join(lines)), block_tokens))


def test_both_published_forms_are_read(tmp_path: Path) -> None:
    # Of 2023, with seven digits and \r\n; and of 2024, with an offset.
    rows = rows_of(HEADER[:-1] + b"\r\n", FIRST[:-1] + b"\r\n", b"\n", b"2023-11-16 18:15:50.9951690,1025,0\r\n")
    assert rows == [Row(0, 374, 44, (0,)), Row(pytest.approx(4_314.579), 1025, 0, (1, 2, 3))]
    path = tmp_path / "trace.CSV"
    path.write_bytes(HEADER + b"2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n")
    assert [row.arrival_ms for row in read(path, 1024)] == [0, 990.07]
    assert [row.hash_ids for row in read(path, 1024)] == [(0, 1, 2), (3, 4, 5)]


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 4_000), st.integers(0, 9)), min_size=1, max_size=20))
def test_nothing_is_shared(requests: list[tuple[int, int, int]]) -> None:
    lines, at_ms = [HEADER], 0
    for gap_ms, prompt, output in requests:
        at_ms += gap_ms
        stamp = f"2024-05-10 00:{at_ms // 60_000:02}:{at_ms % 60_000 / 1000:06.3f}+00:00"
        lines.append(f"{stamp},{prompt},{output}\n".encode())
    rows = rows_of(*lines)
    check_rows(rows)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [each[1:] for each in requests]
    assert statistics(rows).ideal_hit_rate == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"yesterday,1,1\n", "line 3: TIMESTAMP: 'yesterday' is no instant like 2023-11-16 18:15:46"),
        (b"2023-11-16 18:15:46.6,1,1\n", "line 3: TIMESTAMP: 2023-11-16 18:15:46.6.* is before the line above"),
        (b"2023-11-16 18:15:47,0,1\n", r"line 3: ContextTokens: '0' is no whole number in \[1, 4194304\]"),
        (b"2023-11-16 18:15:47,-5,1\n", "line 3: ContextTokens: '-5' is no whole number"),
        (b"2023-11-16 18:15:47,9999999999,1\n", "line 3: ContextTokens: '9999999999' is no whole number"),
        (b"2023-11-16 18:15:47,5,1.5\n", r"line 3: GeneratedTokens: '1.5' is no whole number in \[0, 1048576\]"),
        (b"2023-11-16 18:15:47,5\n", "line 3: 2 fields; must be 3"),
        (b'2023-11-16 18:15:47,"5",1\n', "line 3: ContextTokens: "),
        (b"\xff\xfe\n", "line 3: 1 fields; must be 3"),
        (b"x" * (LINE_BYTES_MAX + 1), f"line 3: longer than {LINE_BYTES_MAX} bytes"),
    ],
)
def test_a_bad_line_is_refused_by_name(line: bytes, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        rows_of(HEADER, FIRST, line)


@pytest.mark.parametrize("header", [b"", FIRST, b"timestamp,a,b\n"])
def test_another_header_is_refused(header: bytes) -> None:
    with pytest.raises(BadRow, match="line 1: the header must be TIMESTAMP,ContextTokens,GeneratedTokens"):
        rows_of(header, FIRST)


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(HEADER + b"1,2\n")
    with pytest.raises(BadRow, match=r"bad\.csv: line 2: 2 fields"):
        list(read(path))
