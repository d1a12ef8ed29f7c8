"""A prefix cache that never evicts, as the bound of what any cache could save of a trace."""

from simulation.workloads.rows import Row


class EndlessCache:
    """All blocks of the rows so far, wherever they were computed."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __len__(self) -> int:
        """In blocks."""
        return len(self._seen)

    def depth(self, row: Row) -> int:
        """How many of the row's leading blocks were there; from now on all are."""
        ids = row.hash_ids
        depth = next((i for i, block in enumerate(ids) if block not in self._seen), len(ids))
        self._seen.update(ids[depth:])
        return depth


def cached_tokens(row: Row, depth: int) -> int:
    """Of `depth` blocks of this row's. At least one token of a prompt is always computed."""
    return min(depth * row.block_tokens, row.prompt_tokens - 1)
