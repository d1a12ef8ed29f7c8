"""What is true of every trace."""

from collections.abc import Sequence
from itertools import pairwise

from simulation.workloads.rows import Row


def check_rows(rows: Sequence[Row]) -> None:
    """Arrivals are in order, every token lies in a block, and an id stands for one beginning: it never has two parents, and a
    block that ends a prompt in its middle is nobody else's."""
    assert all(a.arrival_ms <= b.arrival_ms for a, b in pairwise(rows))
    parents: dict[int, int | None] = {}
    partial: set[int] = set()
    for row in rows:
        assert len(row.hash_ids) == -(-row.prompt_tokens // row.block_tokens)
        assert not partial.intersection(row.hash_ids)
        for parent, block in pairwise((None, *row.hash_ids)):
            assert parents.setdefault(block, parent) == parent  # type: ignore[arg-type]
        if row.prompt_tokens % row.block_tokens:
            partial.add(row.hash_ids[-1])
