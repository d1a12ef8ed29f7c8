"""Placement policies over load: the shape of the paper's Figures 7 to 12, on every trace that is given."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.policies.showing import document, table
from bench.policies.workloads import Source
from cli.simulating.plotting import Line, lines, save
from simulation.policies.outcome import Outcome
from simulation.policies.run import simulate
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, figures

PICTURES = {"mean_s": "TTFT mean, s", "p90_s": "TTFT P90, s", "attainment": "SLO tokens", "hit_rate": "hit rate"}


def routing(
    sources: Sequence[Source], policies: Sequence[Policy], rates: Sequence[float], setup: Setup, slices: int, limit: int,
    warmup_s: float, out: Path | None,
) -> None:  # fmt: skip
    """Every policy on the same slices at each rate; tables, and one picture for each figure."""
    found: dict[str, dict[float, dict[str, list[Outcome]]]] = {}
    for source in sources:
        for rate in rates:
            cell = {
                policy.name: [
                    simulate(
                        replace(policy.of(setup), seed=number),
                        source.slice(number, slices, rate, limit, seed=number),
                        warmup_s,
                    )
                    for number in range(slices)
                ]
                for policy in policies
            }
            found.setdefault(source.name, {})[rate] = cell
            title = (
                f"{source.name} at {rate:g} requests/s on {setup.gpus} GPUs: TTFT in s, mean ± sd over {slices} slices"
            )
            table(title, "policy", cell, policies[0].name)
    document(out, "routing", {name: {rate: _numbers(cell) for rate, cell in of.items()} for name, of in found.items()})
    if out is not None:
        for figure, label in PICTURES.items():
            panels = {name: _of_policy(of_rate, policies, figure) for name, of_rate in found.items()}
            picture = lines(
                panels, "requests/s", label, f"{label} over load, {setup.gpus} modelled GPUs", figure.endswith("_s")
            )
            save(picture, out, f"routing_{figure.removesuffix('_s')}")


def _of_policy(
    of_rate: dict[float, dict[str, list[Outcome]]], policies: Sequence[Policy], figure: str
) -> dict[str, Line]:
    return {
        policy.name: {rate: figures(cell[policy.name])[figure] for rate, cell in of_rate.items()} for policy in policies
    }


def _numbers(cell: dict[str, list[Outcome]]) -> dict[str, object]:
    return {name: figures(outcomes) for name, outcomes in cell.items()}
