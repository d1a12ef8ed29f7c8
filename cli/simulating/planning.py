"""A trace's rows as a replay has them."""

from collections.abc import Iterable

from services.controller.forecast import Replayed
from simulation.workloads.endless import EndlessCache, cached_tokens
from simulation.workloads.rows import Row


def repeated(rows: Iterable[Row], hit_rate: float | None = None) -> list[Replayed]:
    """Cached is what the trace has had before, or `hit_rate` of each prompt."""
    cache, found = EndlessCache(), []
    first_ms: float | None = None
    for row in rows:
        first_ms = row.arrival_ms if first_ms is None else first_ms
        there = cached_tokens(row, cache.depth(row)) if hit_rate is None else int(hit_rate * row.prompt_tokens)
        found.append(Replayed(round((row.arrival_ms - first_ms) * 1_000), row.prompt_tokens - there, there))
    return found
