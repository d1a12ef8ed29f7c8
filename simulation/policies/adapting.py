"""Compositions that stay and policies that change them, under a load that changes: one run, told by the parts of its load."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.contracts.envelope import Stored
from shared.contracts.events import EpochCommitted
from shared.contracts.ids import NodeId
from shared.model.lattice import Composition
from simulation.policies.arrivals import requests_of
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.workloads.mixtures import Stretch, day, phased
from simulation.workloads.rows import Row

BLOCK_TOKENS = 512

GRACE_S = 60.0
"""After each change of the load; the means by phase leave it out, the mean of all has it."""

DAY_S, DAY_PARTS = 3_600.0, 6
"""A day is pressed into an hour at the same rates, and told in six parts."""


class Stretched(NamedTuple):
    """A part of a load: what it is called, and from where to where it is counted, in seconds."""

    name: str
    begin_s: float
    end_s: float


class Load(NamedTuple):
    """What arrives, by seed, and its parts."""

    rows: Callable[[int], Iterator[Row]]
    parts: Sequence[Stretched]


class Part(NamedTuple):
    """Mean TTFT, and the share of tokens served within the objective."""

    mean_s: float
    attainment: float


class Run(NamedTuple):
    """By part and of all; how often a node changed, and how often one went back within two windows."""

    parts: tuple[Part, ...]
    whole: Part
    switches: int
    reversed: int


def in_phases(stretches: Sequence[Stretch], grace_s: float = GRACE_S) -> Load:
    """One stretch after the other."""
    edges = pairwise(accumulate((each.seconds for each in stretches), initial=0.0))
    parts = [
        Stretched(f"{each.requests_per_s:g}/s, {each.long_share:.1%} long", begin_s + grace_s, end_s)
        for each, (begin_s, end_s) in zip(stretches, edges, strict=True)
    ]
    return Load(lambda seed: phased(Random(seed), stretches), parts)


def of_a_day(shrink: float = 1.0) -> Load:
    """A day in an hour, or in `shrink` of one."""
    seconds, hours = DAY_S * shrink, 24 // DAY_PARTS
    edges = pairwise(seconds * number / DAY_PARTS for number in range(DAY_PARTS + 1))
    parts = [Stretched(f"{n * hours} to {(n + 1) * hours} h", *edge) for n, edge in enumerate(edges)]
    return Load(lambda seed: day(Random(seed), seconds), parts)


def run(setup: Setup, load: Load) -> Run:
    """One run, with the requests of the setup's seed."""
    committed: list[Stored] = []

    def hear(stored: Stored) -> None:
        if isinstance(stored.data, EpochCommitted):
            committed.append(stored)

    simulation = Simulation(setup, hear)
    simulation.run(requests_of(load.rows(setup.seed), BLOCK_TOKENS))
    rows = simulation.rows
    arrival_s, ttft_us = rows.column("arrival_us") / 1e6, rows.column("ttft_us")
    tokens, met = rows.column("prompt_tokens"), ttft_us <= rows.column("slo_us")

    def part(counted: npt.NDArray[np.bool_]) -> Part:
        attainment = tokens[counted & met].sum() / tokens[counted].sum()
        return Part(float(ttft_us[counted].mean() / 1e6), float(attainment))

    return Run(
        tuple(part((arrival_s >= each.begin_s) & (arrival_s < each.end_s)) for each in load.parts),
        part(np.ones(len(rows), dtype=np.bool_)),
        len(committed) - len(setup.compositions),
        reversals(committed, 2 * simulation.control.state.parameters.window_s * 10**9),
    )


def reversals(committed: Sequence[Stored], within_ns: int) -> int:
    """How often a node went back to the composition before, this soon after it had left it."""
    had: dict[NodeId, list[tuple[int, Composition]]] = {}
    found = 0
    for stored in committed:
        assert isinstance(stored.data, EpochCommitted), "nothing else was listened for"
        before = had.setdefault(stored.data.node, [])
        before.append((stored.event.time_ns, stored.data.composition))
        if len(before) > 2:
            (_, first), (left_ns, _), (now_ns, last) = before[-3:]
            found += last == first and now_ns - left_ns < within_ns
    return found
