"""Placement policies over load: the shape of the paper's Figures 7 to 12, on every trace that is given.

`paper` has a β and a λ to be set; of those it is run with, at every load the best ones, known in hindsight, are what the
others are compared with.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench.policies.comparing import At, Lengths, Side, Sides, compared, mean, over, table
from cli.simulating.plotting import lines, save
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy
from simulation.policies.studies import policy as policy_of

PAPER = "paper, tuned per load"
PICTURES = {"mean_s": "TTFT mean, s", "p90_s": "TTFT P90, s", "attainment": "SLO tokens", "hit_rate": "hit rate"}


def routing(
    loads: Sequence[At], policies: Sequence[Policy], betas: Sequence[float], lambdas: Sequence[float], setup: Setup,
    lengths: Lengths, jobs: int, kept: Path, out: Path | None,
) -> None:  # fmt: skip
    """Every policy on the same slices at each load; tables, and one picture for each figure."""
    sides = [*_papers(setup, betas, lambdas), *(Side(each.name, each.of(setup)) for each in policies)]
    found = {at: _tuned(of) for at, of in compared(kept / "routing.jsonl", loads, sides, lengths, jobs).items()}
    for at, of in found.items():
        [base] = [name for name in of if name.startswith(PAPER)]
        table(f"{Path(at.trace).stem} at {at.rate:g} requests/s, {setup.gpus} GPUs, {lengths.slices} slices", of, base)
    if out is not None:
        drawn = {at: {name.split(":")[0]: runs for name, runs in of.items()} for at, of in found.items()}
        for figure, label in PICTURES.items():
            panels = {Path(trace).stem: over(drawn, trace, figure) for trace in dict.fromkeys(at.trace for at in loads)}
            title = f"{label} over load, {setup.gpus} modelled GPUs"
            picture = lines(panels, "requests/s", label, title, figure.endswith("_s"))
            save(picture, out, f"routing_{figure.removesuffix('_s')}")


def _papers(setup: Setup, betas: Sequence[float], lambdas: Sequence[float]) -> list[Side]:
    paper = policy_of("paper").of(setup)
    return [
        Side(f"paper: β {beta:g}, λ {lam:g}", replace(paper, parameters={**paper.parameters, "beta": beta, "lam": lam}))
        for beta, lam in product(betas, lambdas)
    ]


def _tuned(of: Sides) -> Sides:
    """Of the paper's policies only that with the least mean."""
    papers = {name: runs for name, runs in of.items() if name.startswith("paper: ")}
    best = min(papers, key=lambda name: mean(papers[name], "mean_s"))
    others = {name: runs for name, runs in of.items() if name not in papers}
    return {best.replace("paper", PAPER, 1): papers[best], **others}
