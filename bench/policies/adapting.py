"""Compositions that stay against compositions that change (the shape of the paper's Figure 13), under a load that changes.

One placement policy on both sides, the same requests for all. The best fixed composition is known in hindsight only; what
`vertumnus plan` makes of the run before is known beforehand. Whoever adapts begins with the first of `FIXED`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from rich.progress import track
from rich.table import Table

from bench.policies.showing import document
from cli.terminal import output
from services.controller.capacity import capacity
from services.controller.planning import Hardware, load, plan
from shared.model.lattice import Composition
from shared.model.parameters import Parameters
from simulation.policies import adapting as adapting_runs
from simulation.policies.adapting import Load, Part, Run
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, spread
from simulation.workloads.mixtures import PHASES
from simulation.workloads.rows import Row

CP8, CP4, CP2 = (8,), (4, 4), (2, 2, 2, 2)
FIXED: Mapping[str, tuple[Composition, ...]] = {
    "10 CP4": (CP4,) * 5,
    "8 CP4, 1 CP8": (CP4,) * 4 + (CP8,),
    "6 CP4, 2 CP8": (CP4,) * 3 + (CP8,) * 2,
    "4 CP4, 3 CP8": (CP4,) * 2 + (CP8,) * 3,
    "2 CP4, 4 CP8": (CP4,) + (CP8,) * 4,
    "5 CP8": (CP8,) * 5,
    "4 CP2, 4 CP4, 2 CP8": (CP2,) + (CP4,) * 2 + (CP8,) * 2,
    "4 CP2, 2 CP4, 3 CP8": (CP2,) + (CP4,) + (CP8,) * 3,
}
DEGREES = (2, 4, 8)
PLANNED = "planned on the run before"
ADAPTING = ("paper", "forecast")
SEEDS_APART = 1_000
"""The run before a seed's has the seed this far from it."""


class Cell(NamedTuple):
    """One run to be made, under the load of a name."""

    setup: Setup
    load: str
    shrink: float


def adapting(policy: Policy, setup: Setup, name: str, seeds: int, shrink: float, jobs: int, out: Path | None) -> None:
    """Every fixed composition and every policy, seed by seed, in so many processes; lengths are `shrink` of themselves.

    Errors: ValueError for an unknown load."""
    told = _load(name, shrink)
    cells = {
        (shown, seed): Cell(replace(each, seed=seed), name, shrink)
        for seed, (shown, each) in product(range(seeds), _setups(policy.of(setup)).items())
    }
    for seed in range(seeds):
        before = _planned(setup, told.rows(seed + SEEDS_APART))
        cells[PLANNED, seed] = Cell(replace(policy.of(setup), compositions=before, seed=seed), name, shrink)
    with get_context("spawn").Pool(jobs) as pool:
        runs = list(track(pool.imap(run, cells.values()), "runs", len(cells), transient=True))
    found: dict[str, list[Run]] = {}
    for (shown, _), each in zip(cells, runs, strict=True):
        found.setdefault(shown, []).append(each)
    title = f"{name} load, placement {policy.name}, {seeds} seeds: mean TTFT in s, tokens within the objective"
    output().print(table(title, [each.name for each in told.parts], found))
    document(out, f"adapting_{name}_{policy.name}", found)


def run(cell: Cell) -> Run:
    """In whichever process."""
    return adapting_runs.run(cell.setup, _load(cell.load, cell.shrink))


def _load(name: str, shrink: float) -> Load:
    match name:
        case "phased":
            return adapting_runs.in_phases([each._replace(seconds=each.seconds * shrink) for each in PHASES])
        case "day":
            return adapting_runs.of_a_day(shrink)
        case _:
            raise ValueError(f"load: {name!r} is not one of phased, day")


def _setups(setup: Setup) -> dict[str, Setup]:
    fixed = {name: replace(setup, compositions=nodes) for name, nodes in FIXED.items()}
    name, first = next(iter(fixed.items()))
    adapts = {
        f"{each}, from {name}": replace(first, parameters={**first.parameters, "reconfiguration_policy": each})
        for each in ADAPTING
    }
    return {**fixed, **adapts}


def _planned(setup: Setup, rows: Iterable[Row]) -> tuple[Composition, ...]:
    """What `vertumnus plan` takes for these requests, of the degrees of `FIXED` and as if nothing were cached."""
    parameters, model = Parameters(), setup.coefficients
    window_us = parameters.window_s * 10**6
    carried = {each: capacity(setup.capacities, setup.capacity_share, window_us, each).us for each in DEGREES}
    asked = load([(row.arrival_ms, row.prompt_tokens) for row in rows], model, parameters.window_s)
    hardware = Hardware(len(setup.compositions), max(DEGREES), carried)
    return plan(asked, hardware, lambda degree, tokens: model.prefill_us(degree, tokens, 0), parameters.up)[0].nodes


def table(title: str, parts: Sequence[str], found: Mapping[str, Sequence[Run]]) -> Table:
    """A line for each composition and policy; then how far each that is not fixed is from the best fixed one of each part."""
    shown = Table("composition", *parts, "all", "against the best fixed", "switches, reversed", title=title)
    best = min(FIXED, key=lambda name: spread([run.whole.mean_s for run in found[name]]).mean)
    for name, runs in found.items():
        pairs = zip(runs, found[best], strict=True)
        change = spread([run.whole.mean_s / other.whole.mean_s - 1 for run, other in pairs])
        switches = spread([float(run.switches) for run in runs]).mean
        shown.add_row(
            name,
            *(_cell([run.parts[index] for run in runs]) for index in range(len(parts))),
            _cell([run.whole for run in runs]),
            "" if name == best else f"{change.mean:+.1%} ±{100 * change.sd:.1f}",
            f"{switches:.1f}, {sum(run.reversed for run in runs)}" if switches else "",
        )
    for name in found:
        if name not in FIXED:
            changes = [f"{_mean_s(found, name, at) / _best_s(found, at) - 1:+.1%}" for at in range(len(parts))]
            shown.add_row(f"{name}: against the best of each", *changes)
    return shown


def _mean_s(found: Mapping[str, Sequence[Run]], name: str, part: int) -> float:
    return spread([run.parts[part].mean_s for run in found[name]]).mean


def _best_s(found: Mapping[str, Sequence[Run]], part: int) -> float:
    return min(_mean_s(found, name, part) for name in FIXED)


def _cell(parts: Sequence[Part]) -> str:
    mean_s, attainment = spread([each.mean_s for each in parts]).mean, spread([each.attainment for each in parts]).mean
    return f"{mean_s:.3f}, {attainment:.1%}"
