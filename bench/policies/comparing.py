"""Setups side by side on the same slices of the same loads, each run a cell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.policies.cells import Cell, Found, filled
from bench.policies.showing import markdown, share
from bench.policies.workloads import Slice
from simulation.policies.run import simulate
from simulation.policies.setup import Setup
from simulation.policies.studies import FIGURES, Spread, spread

COLUMNS = {"mean_s": "mean, s", "p90_s": "P90", "p99_s": "P99", "long_mean_s": "long mean", "attainment": "SLO tokens",
           "hit_rate": "hit rate", "utilisation": "busy"}  # fmt: skip
SHARES = {"attainment", "hit_rate", "utilisation"}


class Lengths(NamedTuple):
    """How much of a trace is run at a rate: so many equal stretches of it, at most `limit` requests of each, of which those of
    the first seconds are not counted."""

    slices: int
    limit: int
    warmup_s: float


class At(NamedTuple):
    """A load: a trace, at a rate in requests/s."""

    trace: str
    rate: float


def loads_of(told: str, rates: Sequence[float]) -> list[At]:
    """`trace@5,8` has rates of its own. Errors: ValueError if they are no numbers."""
    trace, _, own = told.partition("@")
    return [At(trace, rate) for rate in (map(float, own.split(",")) if own else rates)]


class Side(NamedTuple):
    """What is compared: its name, and the setup that it is."""

    name: str
    setup: Setup


Sides = Mapping[str, Sequence[Found]]
"""Figures by side, slice by slice."""


def compared(path: Path, loads: Sequence[At], sides: Sequence[Side], lengths: Lengths, jobs: int) -> dict[At, Sides]:
    """Every side under every load. Errors: ValueError, OSError for a trace that is not to be had."""
    cells = list(_cells(loads, sides, lengths))
    found: dict[At, dict[str, list[Found]]] = {at: {each.name: [] for each in sides} for at in loads}
    for cell, kept in zip(cells, filled(path, cells, jobs), strict=True):
        found[At(str(cell.of["trace"]), float(cell.of["rate"]))][str(cell.of["side"])].append(kept.found)
    return {at: dict(of) for at, of in found.items()}


def _cells(loads: Sequence[At], sides: Sequence[Side], lengths: Lengths) -> Iterator[Cell]:
    for number, at, side in product(range(lengths.slices), loads, sides):
        of = {"trace": at.trace, "rate": at.rate, "side": side.name, "slice": number, **lengths._asdict()}
        asked = Slice(at.trace, at.rate, number, lengths.slices, lengths.limit)
        setup = replace(side.setup, seed=number)
        yield Cell(of, setup, partial(run, setup, asked, lengths.warmup_s))


def run(setup: Setup, asked: Slice, warmup_s: float) -> Found:
    """One cell, in whichever process."""
    outcome = simulate(setup, asked.requests(), warmup_s)
    return {name: figure(outcome) for name, figure in FIGURES.items()}


def table(title: str, sides: Sides, base: str) -> None:
    """A line for each side: means over the slices, and the changes against `base`, slice by slice."""
    print(f"\n{title}\n")
    head = ["", *COLUMNS.values(), "mean, change", "P90, change"]
    markdown(head, (_line(name, found, sides[base] if name != base else None) for name, found in sides.items()))


def over(sides: Mapping[At, Sides], trace: str, figure: str) -> dict[str, dict[float, Spread]]:
    """A figure of each side by rate, for a picture."""
    lines: dict[str, dict[float, Spread]] = {}
    for at, found in sides.items():
        for name, runs in found.items():
            if at.trace == trace:
                lines.setdefault(name, {})[at.rate] = spread(_values(runs, figure))
    return lines


def mean(runs: Sequence[Found], figure: str) -> float:
    """Over the slices."""
    return spread(_values(runs, figure)).mean


def changes(runs: Sequence[Found], base: Sequence[Found], figure: str) -> Spread:
    """By how much of the base's, slice by slice."""
    return spread([one[figure] / other[figure] - 1 for one, other in zip(runs, base, strict=True)])


def _line(name: str, runs: Sequence[Found], base: Sequence[Found] | None) -> list[str]:
    line = [name]
    for figure in COLUMNS:
        values = _values(runs, figure)
        line.append(
            (f"{mean(runs, figure):.1%}" if figure in SHARES else f"{mean(runs, figure):.3f}") if values else "-"
        )
    for figure in ("mean_s", "p90_s"):
        line.append(share(changes(runs, base, figure)) if base else "")
    return line


def _values(runs: Sequence[Found], figure: str) -> list[float]:
    return [value for each in runs if (value := each[figure]) is not None]
