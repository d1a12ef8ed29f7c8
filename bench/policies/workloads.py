"""What the benches send: slices of published traces, or made-up ones like published ones that are not to be had."""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from simulation.policies.arrivals import requests_of
from simulation.policies.routers import Asked
from simulation.workloads.catalogue import WORKLOADS
from simulation.workloads.drifting import Drift, drifting
from simulation.workloads.files import read
from simulation.workloads.rows import Row
from simulation.workloads.shaping import at_speed, jittered, sliced
from simulation.workloads.statistics import statistics

BLOCK_TOKENS = 512
DRIFTING = "drifting"


class Source(NamedTuple):
    """Rows and what is needed to bring them to a rate."""

    name: str
    rows: list[Row]
    length_ms: float
    grid_ms: float

    def slice(self, number: int, of: int, rate: float, limit: int, seed: int) -> Iterator[Asked]:
        """Part `number` of `of` equal stretches of time, at a mean of `rate` requests/s, at most `limit` requests."""
        length_ms = self.length_ms / of
        part = list(sliced(self.rows, number * length_ms, (number + 1) * length_ms))
        natural = len(part) / (length_ms / 1_000)
        spread = jittered(part, self.grid_ms, Random(seed))
        return requests_of(sliced(at_speed(spread, rate / natural), limit=limit), BLOCK_TOKENS)


class Slice(NamedTuple):
    """Part `number` of `of` of a trace at a rate, at most `limit` requests: what a process needs to know to make them. Prefixes
    that drift are made for the rate, each part from a seed of its own, so that they drift as fast at any rate."""

    trace: str
    rate: float
    number: int
    of: int
    limit: int

    def requests(self) -> Iterator[Asked]:
        """Errors: ValueError, OSError."""
        if self.trace == DRIFTING:
            rows = drifting(Random(self.number), Drift(requests_per_s=self.rate))
            return requests_of(islice(rows, self.limit), BLOCK_TOKENS)
        return _source(self.trace).slice(self.number, self.of, self.rate, self.limit, seed=self.number)


def source(name: str) -> Source:
    """A trace file, or a made-up workload by name. Errors: ValueError, OSError."""
    rows = list(WORKLOADS[name](Random(1)) if name in WORKLOADS else read(Path(name), BLOCK_TOKENS))
    found = statistics(rows)
    return Source(Path(name).stem, rows, rows[-1].arrival_ms + 1, found.arrival_grid_ms)


_source = cache(source)
"""A process reads a trace once."""
