"""What came of a simulation: a few numbers a request while it runs, and the figures of it afterwards."""

from array import array
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.model.cost import US_PER_S
from simulation.policies.routers import Ended

LONG_TOKENS = 32 * 1024
"""A prompt beyond this is long (the paper's long share)."""

Column = npt.NDArray[np.int64]


class Rows:
    """The requests that ended with a first token, in the order of their ends: 56 bytes each."""

    COLUMNS = ("arrival_us", "prompt_tokens", "cached_tokens", "slo_us", "ttft_us", "queue_us", "degree")

    def __init__(self) -> None:
        self._values = array("q")
        self.unserved = 0
        self.assignments = 0

    def add(self, ended: Ended) -> None:
        """One request has ended."""
        assigned, completed = ended.assigned, ended.completed
        if assigned is None or completed is None:
            self.unserved += 1
            return
        self.assignments += assigned.attempt
        row = (
            ended.asked.at_ns // 1_000,
            ended.asked.prompt_tokens,
            completed.cached_tokens,
            ended.slo_us,
            completed.ttft_us,
            completed.queue_us,
            assigned.degree,
        )
        self._values.extend(row)

    def __len__(self) -> int:
        return len(self._values) // len(self.COLUMNS)

    def column(self, name: str) -> Column:
        """Shape (requests,). A copy of nothing else: ten million rows are half a gigabyte."""
        return np.array(self._values[self.COLUMNS.index(name) :: len(self.COLUMNS)], dtype=np.int64)


class Times(NamedTuple):
    """Seconds to the first token."""

    requests: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    queue_mean_s: float


class Outcome(NamedTuple):
    """A run in figures. Shares are in [0, 1]; those of tokens weigh each request by its prompt."""

    ttft: Times
    short: Times | None
    long: Times | None
    attainment: float
    hit_rate: float
    utilisation: float
    by_degree: dict[int, int]
    unserved: int
    redirects: int
    reconfigurations: int
    virtual_s: float
    events: int


def outcome(
    rows: Rows, busy_gpu_s: float, gpus: int, warmup_s: float, reconfigurations: int, virtual_s: float, events: int
) -> Outcome:
    """The figures over what arrived after `warmup_s`. ValueError if nothing did."""
    counted = rows.column("arrival_us") >= round(warmup_s * US_PER_S)
    if not counted.any():
        raise ValueError(f"no request arrived after the first {warmup_s:g} s and was served")
    columns = {name: rows.column(name)[counted] for name in Rows.COLUMNS}
    tokens, ttft_us = columns["prompt_tokens"], columns["ttft_us"]
    is_long, met = tokens > LONG_TOKENS, ttft_us <= columns["slo_us"]
    return Outcome(
        ttft=_times(ttft_us, columns["queue_us"]),
        short=_times(ttft_us[~is_long], columns["queue_us"][~is_long]) if (~is_long).any() else None,
        long=_times(ttft_us[is_long], columns["queue_us"][is_long]) if is_long.any() else None,
        attainment=float(tokens[met].sum() / tokens.sum()),
        hit_rate=float(columns["cached_tokens"].sum() / tokens.sum()),
        utilisation=busy_gpu_s / (gpus * virtual_s),
        by_degree=dict(sorted(Counter(columns["degree"].tolist()).items())),
        unserved=rows.unserved,
        redirects=rows.assignments - len(rows),
        reconfigurations=reconfigurations,
        virtual_s=virtual_s,
        events=events,
    )


def _times(ttft_us: Column, queue_us: Column) -> Times:
    p50, p90, p99 = np.percentile(ttft_us, (50, 90, 99)) / US_PER_S
    mean_s, queue_s = ttft_us.mean() / US_PER_S, queue_us.mean() / US_PER_S
    return Times(len(ttft_us), float(mean_s), float(p50), float(p90), float(p99), float(queue_s))
