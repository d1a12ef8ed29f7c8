"""Traces in files, whichever of the known formats they have."""

from collections.abc import Iterator
from pathlib import Path

from simulation.workloads import azure, rows
from simulation.workloads.rows import BLOCK_TOKENS, BadRow, Row


def read(path: Path, block_tokens: int = BLOCK_TOKENS) -> Iterator[Row]:
    """The rows of a file, in order, one at a time: Azure's form if its name ends in `.csv`, else Mooncake's.

    Errors: BadRow at the first bad line; OSError when the file cannot be read.
    """
    parsed = azure.parsed if path.suffix.lower() == ".csv" else rows.parsed
    with path.open("rb") as file:
        try:
            yield from parsed(file, block_tokens)
        except BadRow as bad:
            raise BadRow(f"{path}: {bad}") from bad
