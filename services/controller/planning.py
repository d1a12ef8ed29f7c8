"""The composition to begin with, by the paper's rule (section 4.3). Pure; `searching.py` goes on from here.

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
from shared.model.lattice import Composition, degree_min

Prefill = Callable[[int, int], int]
"""(degree, prompt tokens) → predicted microseconds, cache hits as expected."""


class Load(NamedTuple):
    """What a trace asks for: its P90 length with the objective for it, the prompts of its busiest window, and its longest."""

    p90_tokens: int
    slo_us: int
    busiest: Sequence[int]
    longest_tokens: int = 1


class Hardware(NamedTuple):
    """So many equal nodes; κ_C by degree in microseconds of a window. A rank's KV memory holds `rank_tokens`, None if that is
    no bound; `step_tokens` of one prompt are computed in a step, and every worker has to hold them."""

    nodes: int
    ranks: int
    capacities_us: Mapping[int, int]
    rank_tokens: int | None = None
    step_tokens: int = 1

    def degrees(self, longest_tokens: int) -> tuple[int, ...]:
        """Those whose workers hold a step, in rising order."""
        degrees = tuple(sorted(self.capacities_us))
        if self.rank_tokens is None:
            return degrees
        least = degree_min(degrees, self.rank_tokens, min(self.step_tokens, longest_tokens), cyclic=True)
        return tuple(each for each in degrees if each >= least)

    def holds(self, degree: int, tokens: int) -> bool:
        return self.rank_tokens is None or degree * self.rank_tokens >= tokens


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
    return Load(p90_tokens, coefficients.slo_us(p90_tokens), windows[busiest], max(tokens for _, tokens in asked))


def plan(load: Load, hardware: Hardware, prefill: Prefill, up: float) -> list[Candidate]:
    """Every candidate that takes all prompts, best first. `up` is the share of its capacity that a pool should be asked for at
    most. Errors: ValueError if there is none."""
    degrees = hardware.degrees(load.longest_tokens)
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
        if hardware.holds(max(map(max, nodes)), load.longest_tokens)
    ]
    if not found:
        longest = max(map(max, forms))
        raise ValueError(
            f"rank_tokens: workers of degree {longest} hold {longest * (hardware.rank_tokens or 0)} tokens; the trace's longest"
            f" prompt has {load.longest_tokens}"
        )
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
