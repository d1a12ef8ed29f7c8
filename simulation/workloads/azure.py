"""Azure's traces of inference: a CSV of instants and lengths, which say nothing of what prompts share.

The header is `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure/AzurePublicDataset, AzureLLMInferenceDataset2023 and 2024).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from typing import BinaryIO

from simulation.workloads.rows import BLOCK_TOKENS, OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, BadRow, Row, numbered_lines

FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def parsed(file: BinaryIO, block_tokens: int = BLOCK_TOKENS) -> Iterator[Row]:
    """The rows of an open file, in order; the first arrives at 0. Every block is its own, so no cache hits anything.

    Errors: BadRow at the first bad line.
    """
    ids, first, earliest_ms = count(), None, 0.0
    lines = numbered_lines(file)
    _, header = next(lines, (1, b""))
    if header.strip().split(b",") != [name.encode() for name in FIELDS]:
        raise BadRow(f"line 1: the header must be {','.join(FIELDS)}, not {header[:100]!r}")
    for number, line in lines:
        try:
            at, prompt_tokens, output_tokens = _fields(line)
            first = first or at
            arrival_ms = (at - first).total_seconds() * 1000
            if arrival_ms < earliest_ms:
                raise ValueError(f"TIMESTAMP: {at} is before the line above")
        except ValueError as error:
            raise BadRow(f"line {number}: {error}") from error
        earliest_ms = arrival_ms
        blocks = -(-prompt_tokens // block_tokens)
        yield Row(arrival_ms, prompt_tokens, output_tokens, tuple(next(ids) for _ in range(blocks)), block_tokens)


def _fields(line: bytes) -> tuple[datetime, int, int]:
    fields = line.decode("ascii", "replace").strip().split(",")
    if len(fields) != len(FIELDS):
        raise ValueError(f"{len(fields)} fields; must be {len(FIELDS)}")
    try:
        at = datetime.fromisoformat(fields[0])
    except ValueError:
        raise ValueError(f"TIMESTAMP: {fields[0][:40]!r} is no instant like 2023-11-16 18:15:46.680590") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return at, _whole(fields, 1, 1, PROMPT_TOKENS_MAX), _whole(fields, 2, 0, OUTPUT_TOKENS_MAX)


def _whole(fields: list[str], index: int, least: int, most: int) -> int:
    text = fields[index]
    if not (text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise ValueError(f"{FIELDS[index]}: {text[:40]!r} is no whole number in [{least}, {most}]")
    return int(text)
