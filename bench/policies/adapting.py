"""Compositions that stay against compositions that change (the shape of the paper's Figure 13), under a load that changes.

One placement policy on both sides, the same requests for all. The best fixed composition is known in hindsight only; what
`vertumnus plan` makes of the run before, by the paper's rule or by a replay, is known beforehand. Whoever adapts begins with
the first of `FIXED`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.policies.cells import Cell, Found, Names, filled
from bench.policies.showing import markdown, share
from cli.simulating.planning import repeated
from cli.simulating.plotting import lines, save
from services.controller.capacity import capacity
from services.controller.forecast import rule
from services.controller.planning import Hardware, load, plan
from services.controller.searching import replay, search
from shared.model.lattice import Composition
from shared.model.parameters import Parameters
from simulation.policies import adapting as adapting_runs
from simulation.policies.adapting import Load
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, Spread, spread
from simulation.workloads.mixtures import PHASES
from simulation.workloads.rows import Row

CP8, CP4, CP2 = (8,), (4, 4), (2, 2, 2, 2)


def _named(nodes: Iterable[Composition]) -> str:
    counts = Counter(degree for composition in nodes for degree in composition)
    return ", ".join(f"{counts[degree]} CP{degree}" for degree in sorted(counts))


EVERY = {_named(nodes): nodes for nodes in combinations_with_replacement((CP2, CP4, CP8), 5)}
"""The 21 pools of five nodes that each have workers of one degree, as `forecast` would have them, and none of degree 1."""

FIXED: Mapping[str, tuple[Composition, ...]] = {
    name: EVERY[name]
    for name in (
        "10 CP4",
        "8 CP4, 1 CP8",
        "6 CP4, 2 CP8",
        "4 CP4, 3 CP8",
        "2 CP4, 4 CP8",
        "5 CP8",
        "4 CP2, 4 CP4, 2 CP8",
        "4 CP2, 2 CP4, 3 CP8",
    )
}
"""Those that are run at full length: all without workers of degree 2, and what is next to the best of them with some."""

DEGREES = (2, 4, 8)
PLANNED, REPLAYED = "planned on the run before", "replayed on the run before"
"""By the paper's rule, and by the replay that `vertumnus plan` makes."""

ADAPTING = ("paper", "forecast")
SEEDS_APART = 1_000
"""The run before a seed's has the seed this far from it."""

CLAIMS = (
    (1, "8 CP4, 1 CP8", "4 CP4, 3 CP8", "-19.6 %"),
    (3, "2 CP4, 4 CP8", "4 CP4, 3 CP8", "-5.5 %"),
    (3, "2 CP4, 4 CP8", "6 CP4, 2 CP8", "-14.5 %"),
)
"""Of the paper: in which of the phases one composition is better than another, and by how much there."""


class Runs(NamedTuple):
    """The runs of one composition or policy, by seed."""

    name: str
    found: tuple[Found, ...]

    def mean_s(self, part: int) -> float:
        return fmean(_part_s(part, each) for each in self.found)

    def by_part(self, parts: int) -> dict[float, Spread]:
        """Mean TTFT in each part of the load, counted from 1."""
        return {part + 1: spread([_part_s(part, each) for each in self.found]) for part in range(parts)}

    def attainment(self, part: int) -> float:
        return fmean(float(each["parts"][part][1]) for each in self.found)

    def change(self, other: "Runs", figure: Callable[[Found], float]) -> str:
        pairs = zip(self.found, other.found, strict=True)
        return share(spread([figure(one) / figure(base) - 1 for one, base in pairs]))


def adapting(
    policies: Sequence[Policy], setup: Setup, name: str, seeds: int, shrink: float, every: bool, jobs: int, kept: Path,
    out: Path | None,
) -> None:  # fmt: skip
    """The fixed compositions, or `every` one, and every policy that adapts, under each placement; lengths are `shrink` of
    themselves. Tables, and a picture by the parts of the load.

    Errors: ValueError for an unknown load."""
    told = load_of(name, shrink)
    before = [list(told.rows(seed + SEEDS_APART)) for seed in range(seeds)]
    cells = [
        _cell(policy, each, called, name, shrink)
        for seed, policy in product(range(seeds), policies)
        for called, each in _setups(replace(policy.of(setup), seed=seed), EVERY if every else FIXED, before[seed])
    ]
    found = filled(kept / f"adapting-{name}.jsonl", cells, jobs)
    panels: dict[str, dict[str, dict[float, Spread]]] = {}
    for policy in policies:
        of_policy = [each for each in found if each.of["placement"] == policy.name]
        runs = [
            Runs(str(called), tuple(each.found for each in of_policy if each.of["composition"] == called))
            for called in dict.fromkeys(each.of["composition"] for each in of_policy)
        ]
        print(f"\n`{policy.name}` placement, {name} load, {seeds} seeds\n")
        table([each.name for each in told.parts], runs)
        if name == "phased":
            _claims([each.name for each in told.parts], runs)
        panels[policy.name] = {each.name: each.by_part(len(told.parts)) for each in runs}
    if out is not None:
        picture = lines(panels, "part of the load", "TTFT mean, s", f"compositions, {name} load", logarithmic=True)
        save(picture, out, f"adapting_{name}")


def run(setup: Setup, name: str, shrink: float) -> Found:
    """One cell, in whichever process."""
    return adapting_runs.run(setup, load_of(name, shrink))._asdict()


def load_of(name: str, shrink: float) -> Load:
    """Errors: ValueError."""
    match name:
        case "phased":
            return adapting_runs.in_phases([each._replace(seconds=each.seconds * shrink) for each in PHASES])
        case "day":
            return adapting_runs.of_a_day(shrink)
        case _:
            raise ValueError(f"load: {name!r} is not one of phased, day")


def _cell(policy: Policy, setup: Setup, called: str, name: str, shrink: float) -> Cell:
    of: Names = {"load": name, "shrink": shrink, "placement": policy.name, "composition": called, "seed": setup.seed}
    return Cell(of, setup, partial(run, setup, name, shrink))


def _setups(
    setup: Setup, fixed: Mapping[str, tuple[Composition, ...]], before: Sequence[Row]
) -> Iterator[tuple[str, Setup]]:
    for name, nodes in {**fixed, **_planned(setup, before)}.items():
        yield name, replace(setup, compositions=nodes)
    first = next(iter(FIXED.values()))
    for name in ADAPTING:
        parameters = {**setup.parameters, "reconfiguration_policy": name}
        yield f"`{name}`", replace(setup, compositions=first, parameters=parameters)


def _planned(setup: Setup, rows: Sequence[Row]) -> Mapping[str, tuple[Composition, ...]]:
    """What `vertumnus plan` takes for these requests, of the degrees of `FIXED`: by the paper's rule as if nothing were cached,
    and by a replay with what repeats."""
    parameters, model = Parameters(**setup.parameters), setup.coefficients
    window_us = parameters.window_s * 10**6
    carried = {each: capacity(setup.capacities, setup.capacity_share, window_us, each).us for each in DEGREES}
    asked = load([(row.arrival_ms, row.prompt_tokens) for row in rows], model, parameters.window_s)
    hardware = Hardware(len(setup.compositions), max(DEGREES), carried)
    found = plan(asked, hardware, lambda degree, tokens: model.prefill_us(degree, tokens, 0), parameters.up)
    tried = search(found, replay(repeated(rows), model, rule(parameters)))
    return {PLANNED: found[0].nodes, REPLAYED: tried[0].candidate.nodes}


def table(parts: Sequence[str], runs: Sequence[Runs]) -> None:
    """Mean TTFT in s by part and of all; then how far each that is not fixed is from the best fixed one of each part; then the
    tokens served within the objective, likewise by part."""
    fixed = [each for each in runs if each.name in EVERY]
    best = min(fixed, key=lambda each: _mean(each, _whole_s))
    planned = [each for each in runs if each.name in (PLANNED, REPLAYED)]
    head = [
        "mean TTFT, s",
        *parts,
        "all",
        "against the best fixed",
        *(f"against {each.name}" for each in planned),
        "switches, reversed",
    ]
    rows = [
        [
            each.name,
            *(f"{each.mean_s(part):.3f}" for part in range(len(parts))),
            f"{_mean(each, _whole_s):.4f}",
            "best" if each is best else each.change(best, _whole_s),
            *("" if each is other else each.change(other, _whole_s) for other in planned),
            f"{_mean(each, _switches):.1f}, {sum(run['reversed'] for run in each.found)}",
        ]
        for each in runs
    ]
    for each in runs:
        if each.name not in EVERY:
            least_s = [min(other.mean_s(part) for other in fixed) for part in range(len(parts))]
            changes = [f"{each.mean_s(part) / least_s[part] - 1:+.1%}" for part in range(len(parts))]
            rows.append([f"{each.name}: against the best of each", *changes, "", "", *("" for _ in planned), ""])
    markdown(head, rows)
    print()
    markdown(
        ["SLO tokens", *parts, "all"],
        [
            [
                each.name,
                *(f"{each.attainment(part):.1%}" for part in range(len(parts))),
                f"{_mean(each, _attainment):.1%}",
            ]
            for each in runs
        ],
    )


def _claims(parts: Sequence[str], runs: Sequence[Runs]) -> None:
    named = {each.name: each for each in runs}
    print()
    markdown(
        ["phase", "better", "than", "paper", "here"],
        [
            [parts[part], one, other, told, named[one].change(named[other], partial(_part_s, part))]
            for part, one, other, told in CLAIMS
        ],
    )


def _mean(runs: Runs, figure: Callable[[Found], float]) -> float:
    return fmean(map(figure, runs.found))


def _part_s(part: int, found: Found) -> float:
    return float(found["parts"][part][0])


def _whole_s(found: Found) -> float:
    return float(found["whole"][0])


def _attainment(found: Found) -> float:
    return float(found["whole"][1])


def _switches(found: Found) -> float:
    return float(found["switches"])
