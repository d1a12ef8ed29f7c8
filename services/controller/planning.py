"""The composition to begin with, from a trace (paper, section 4.3). Pure.

Suitable is what serves the trace's P90 length within its objective at its largest degree. Of what is suitable and has the
capacity for the busiest window, the one with most workers of large degrees is taken; if none has, the one with the largest
capacity. Demand depends on who serves: each degree is taken to get the share of prompts that it has of the capacity.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

from services.controller.forecast import SMALL_POOL, shapes
from services.controller.steps import NodeSight
from shared.contracts.ids import NodeId
from shared.model.cost import Coefficients
from shared.model.lattice import Composition

Prefill = Callable[[int, int], int]
"""(degree, prompt tokens) → predicted microseconds, cache hits as expected."""


class Load(NamedTuple):
    """What a trace asks for: its P90 length with the objective for it, and the prompts of its busiest window."""

    p90_tokens: int
    slo_us: int
    busiest: Sequence[int]


class Hardware(NamedTuple):
    """So many equal nodes; κ_C by degree in microseconds of a window."""

    nodes: int
    ranks: int
    capacities_us: Mapping[int, int]


class Candidate(NamedTuple):
    """One composition of the pool, and what speaks for and against it."""

    nodes: tuple[Composition, ...]
    suitable: bool
    demand_us: int
    capacity_us: int
    p90_us: int

    @property
    def enough(self) -> bool:
        return self.demand_us <= self.capacity_us

    @property
    def degrees(self) -> tuple[int, ...]:
        """Of all workers, in falling order."""
        return tuple(sorted((degree for each in self.nodes for degree in each), reverse=True))


def load(asked: Sequence[tuple[float, int]], coefficients: Coefficients, window_s: int) -> Load:
    """Of a trace: (arrival in ms, prompt tokens) of each request. ValueError if there is none."""
    if not asked:
        raise ValueError("the trace: no request in it")
    windows: dict[int, list[int]] = {}
    for arrival_ms, tokens in asked:
        windows.setdefault(int(arrival_ms // (window_s * 1_000)), []).append(tokens)
    demand_us = {k: sum(coefficients.prefill_us(1, each, 0) for each in lengths) for k, lengths in windows.items()}
    busiest = max(windows, key=lambda k: (demand_us[k], -k))
    p90_tokens = sorted(tokens for _, tokens in asked)[len(asked) * 9 // 10]
    return Load(p90_tokens, coefficients.slo_us(p90_tokens), windows[busiest])


def plan(load: Load, hardware: Hardware, prefill: Prefill, up: float) -> list[Candidate]:
    """Every candidate, best first. `up` is the share of its capacity that a pool should be asked for at most."""
    degrees = tuple(hardware.capacities_us)
    whole = NodeSight(NodeId("n"), (0,) * hardware.ranks, degrees, ())
    mixed = hardware.nodes <= SMALL_POOL
    forms = shapes(whole._replace(composition=(hardware.ranks,)), mixed=mixed)
    if hardware.ranks in degrees:
        forms.insert(0, (hardware.ranks,))
    if not forms:
        raise ValueError(f"degrees: {hardware.ranks} ranks cannot be divided into workers of {list(degrees)}")
    demands_us = {degree: sum(prefill(degree, tokens) for tokens in load.busiest) for degree in degrees}
    found = [
        _candidate(nodes, load, hardware, prefill, demands_us, up)
        for nodes in combinations_with_replacement(forms, hardware.nodes)
    ]
    return sorted(found, key=_rank, reverse=True)


def _candidate(
    nodes: tuple[Composition, ...],
    load: Load,
    hardware: Hardware,
    prefill: Prefill,
    demands_us: Mapping[int, int],
    up: float,
) -> Candidate:
    counts = Counter(degree for each in nodes for degree in each)
    carried = {degree: number * hardware.capacities_us[degree] for degree, number in counts.items()}
    capacity_us = sum(carried.values())
    demand_us = sum(demands_us[degree] * each for degree, each in carried.items()) // max(1, capacity_us)
    p90_us = prefill(max(counts), load.p90_tokens)
    return Candidate(nodes, p90_us <= load.slo_us, demand_us, round(up * capacity_us), p90_us)


def _rank(each: Candidate) -> tuple[bool, bool, tuple[int, ...], int]:
    """Large degrees count only where capacity is there; where it is not, capacity does."""
    fit = each.suitable and each.enough
    return each.suitable, fit, each.degrees if fit else (), each.capacity_us
