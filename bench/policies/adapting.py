"""Compositions that stay against compositions that change (the shape of the paper's Figure 13), under a load that changes.

One placement policy on both sides. The best fixed composition is known in hindsight only; whoever adapts begins with the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from rich.table import Table

from bench.policies.showing import document
from bench.policies.workloads import BLOCK_TOKENS
from cli.simulating.asking import parse_nodes
from cli.terminal import output
from simulation.policies.arrivals import requests_of
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, spread
from simulation.workloads.mixtures import PHASES, Stretch, phased

FIXED: Mapping[str, Sequence[str]] = {
    "10 CP4": ["5x4,4"],
    "6 CP4, 2 CP8": ["3x4,4", "2x8"],
    "4 CP4, 3 CP8": ["2x4,4", "3x8"],
    "4 CP2, 2 CP4, 3 CP8": ["2,2,2,2", "4,4", "3x8"],
}
ADAPTING = ("paper", "forecast")

GRACE_S = 60.0
"""After each change of the load; the means by phase leave it out, the mean of all has it."""


class Run(NamedTuple):
    """Mean TTFT by phase after its grace, and of all; how often a composition changed."""

    phases_s: tuple[float, ...]
    all_s: float
    switches: int


def adapting(policy: Policy, setup: Setup, seeds: int, shrink: float, out: Path | None) -> None:
    """Every fixed composition and every policy on the same requests; phases are `shrink` of their length."""
    stretches = [each._replace(seconds=each.seconds * shrink) for each in PHASES]
    found: dict[str, list[Run]] = {}
    for seed in range(seeds):
        for name, nodes in FIXED.items():
            fixed = replace(policy.of(setup), compositions=parse_nodes(nodes, None), seed=seed)
            found.setdefault(name, []).append(_run(fixed, stretches, seed))
        for name in ADAPTING:
            first = replace(policy.of(setup), compositions=parse_nodes(FIXED["10 CP4"], None), seed=seed)
            changed = replace(first, parameters={**first.parameters, "reconfiguration_policy": name})
            found.setdefault(f"{name}, from 10 CP4", []).append(_run(changed, stretches, seed))
    output().print(_table(f"placement {policy.name}, {seeds} seeds: mean TTFT in s", stretches, found))
    document(out, f"adapting_{policy.name}", found)


def _run(setup: Setup, stretches: Sequence[Stretch], seed: int) -> Run:
    simulation = Simulation(setup)
    outcome = simulation.run(requests_of(phased(Random(seed), stretches), BLOCK_TOKENS))
    arrival_s, ttft_s = (simulation.rows.column(name) / 1e6 for name in ("arrival_us", "ttft_us"))
    ends_s = list(accumulate(each.seconds for each in stretches))
    phases_s = []
    for begin_s, end_s in zip([0.0, *ends_s], ends_s, strict=False):
        counted = (arrival_s >= begin_s + GRACE_S) & (arrival_s < end_s)
        phases_s.append(float(np.mean(ttft_s[counted])))
    return Run(tuple(phases_s), float(np.mean(ttft_s)), outcome.reconfigurations)


def _table(title: str, stretches: Sequence[Stretch], found: Mapping[str, Sequence[Run]]) -> Table:
    phases = [f"{each.requests_per_s:g}/s, {each.long_share:.1%} long" for each in stretches]
    shown = Table("composition", *phases, "all", "against the best fixed", "switches", title=title)
    best = min(FIXED, key=lambda name: spread([run.all_s for run in found[name]]).mean)
    for name, runs in found.items():
        cells = [f"{spread([run.phases_s[index] for run in runs]).mean:.3f}" for index in range(len(stretches))]
        change = spread([run.all_s / other.all_s - 1 for run, other in zip(runs, found[best], strict=True)])
        shown.add_row(
            name,
            *cells,
            f"{spread([run.all_s for run in runs]).mean:.3f}",
            "" if name == best else f"{change.mean:+.1%} ±{100 * change.sd:.1f}",
            f"{spread([float(run.switches) for run in runs]).mean:.1f}",
        )
    return shown
