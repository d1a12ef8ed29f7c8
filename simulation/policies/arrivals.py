"""Rows of a trace as the requests of a simulation."""

from collections.abc import Iterable, Iterator

from shared.contracts.ids import BLOCK_ID_BYTES, BlockId
from simulation.policies.routers import Asked
from simulation.workloads.rows import Row


def requests_of(rows: Iterable[Row], block_tokens: int) -> Iterator[Asked]:
    """In the order of the rows. A last, partial block is nobody's to share. ValueError for rows of other blocks."""
    for row in rows:
        if row.block_tokens != block_tokens:
            raise ValueError(
                f"block_tokens: the trace has blocks of {row.block_tokens} tokens, the pool of {block_tokens}"
            )
        whole = row.hash_ids[: row.prompt_tokens // block_tokens]
        chain = tuple(BlockId(each.to_bytes(BLOCK_ID_BYTES)) for each in whole)
        yield Asked(round(row.arrival_ms * 1e6), row.prompt_tokens, chain)
