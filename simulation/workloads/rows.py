"""One request of a trace, and Mooncake's file format: read strictly, written the same way.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}`. The ids name the
prompt's blocks of 512 tokens; an id stands for its block *and all before it*, so two prompts share exactly the blocks of
their common leading ids. The last block may be partial.
"""

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

BLOCK_TOKENS = 512
"""What one hash id stands for, unless a file says otherwise by its name or its author."""

BLOCK_TOKENS_MIN = 4
"""Fewer tokens to a block, and blocks of different ids would often be equal."""

PROMPT_TOKENS_MAX = 4 * 2**20
OUTPUT_TOKENS_MAX = 2**20
TIMESTAMP_MS_MAX = 10 * 365 * 86_400_000
HASH_ID_MAX = 2**63 - 1
LINE_BYTES_MAX = 4 * 2**20
"""A line of the longest prompt at 64 tokens to a block; nothing longer is held in memory."""


class BadRow(ValueError):
    """A line that is no row of a trace. The message names the line, the field and the limit."""


class Row(NamedTuple):
    """One request. `len(hash_ids) == ceil(prompt_tokens / block_tokens)`."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS


def parsed(file: BinaryIO, block_tokens: int = BLOCK_TOKENS) -> Iterator[Row]:
    """The rows of an open file in Mooncake's form. Errors: BadRow at the first bad line."""
    earliest = 0.0
    for number, line in numbered_lines(file):
        try:
            row = _row(line, block_tokens)
        except ValueError as error:
            raise BadRow(f"line {number}: {error}") from error
        if row.arrival_ms < earliest:
            raise BadRow(f"line {number}: timestamp: {row.arrival_ms:g} is before the line above, {earliest:g}")
        earliest = row.arrival_ms
        yield row


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers. Errors: BadRow for one that is too long to be held."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise BadRow(f"line {number}: longer than {LINE_BYTES_MAX} bytes")
        if line.strip():
            yield number, line


def write(rows: Iterable[Row], file: BinaryIO) -> int:
    """Write the rows and say how many. Arrivals are rounded to whole milliseconds, as the format has them."""
    count = 0
    for row in rows:
        count += 1
        document = {
            "timestamp": round(row.arrival_ms),
            "input_length": row.prompt_tokens,
            "output_length": row.output_tokens,
            "hash_ids": row.hash_ids,
        }
        file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
    return count


def _row(line: bytes, block_tokens: int) -> Row:
    document = orjson.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    arrival_ms = _number(document, "timestamp", TIMESTAMP_MS_MAX)
    prompt_tokens = _whole(document, "input_length", 1, PROMPT_TOKENS_MAX)
    output_tokens = _whole(document, "output_length", 0, OUTPUT_TOKENS_MAX)
    hash_ids = document.get("hash_ids")
    if not isinstance(hash_ids, list):
        raise ValueError("hash_ids: missing, or not a list")
    blocks = -(-prompt_tokens // block_tokens)
    if len(hash_ids) != blocks:
        raise ValueError(
            f"hash_ids: {len(hash_ids)} ids for {prompt_tokens} tokens; must be {blocks}, one per {block_tokens} tokens"
        )
    for value in hash_ids:
        if type(value) is not int or not 0 <= value <= HASH_ID_MAX:
            raise ValueError(f"hash_ids: {value!r} is no whole number in [0, {HASH_ID_MAX}]")
    return Row(arrival_ms, prompt_tokens, output_tokens, tuple(hash_ids), block_tokens)


def _whole(document: dict[str, Any], field: str, least: int, most: int) -> int:
    value = document.get(field)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{field}: {value!r} is no whole number in [{least}, {most}]")
    return value


def _number(document: dict[str, Any], field: str, most: int) -> float:
    value = document.get(field)
    # A bool is an int; the comparison also refuses NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{field}: {value!r} is no number in [0, {most}]")
    return float(value)
