"""A load that shifts, on compositions that stay and on one that adapts: in virtual time, by the deciders of the services.

Three minutes of many short prompts, five of few but long ones, two of what lies between, on the pool of the second half. No one
composition is best in all of them, and who adapts is not told what comes.
"""

from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shared.model.cost import load_coefficients
from shared.model.lattice import Composition
from simulation.policies.adapting import Run, in_phases, run
from simulation.policies.setup import Setup
from simulation.workloads.mixtures import Stretch

STRETCHES = (Stretch(180, 27.5, 0.004), Stretch(300, 2.4, 0.30), Stretch(120, 15, 0.03))
CP4, CP8 = (4, 4), (8,)
FIXED: Mapping[str, tuple[Composition, ...]] = {
    "10 CP4": (CP4,) * 5,
    "6 CP4, 2 CP8": (CP4,) * 3 + (CP8,) * 2,
    "2 CP4, 4 CP8": (CP4,) + (CP8,) * 4,
    "5 CP8": (CP8,) * 5,
}
ADAPTING = "forecast, from 10 CP4"
PROCESSES = 2

Shifting = Mapping[str, Run]
"""What came of each."""


def compare(console: Console) -> Shifting:
    """Every composition on the same requests, with progress."""
    setups = _setups()
    with get_context("spawn").Pool(PROCESSES) as pool:
        runs = track(pool.imap(_run, setups.values()), "compositions", len(setups), console=console, transient=True)
        return dict(zip(setups, runs, strict=True))


def _setups() -> dict[str, Setup]:
    placed = {"placement_policy": "vertumnus"}
    first = Setup(FIXED["10 CP4"], load_coefficients("qwen3_30b_a3b_h20"), parameters=placed)
    fixed = {name: replace(first, compositions=nodes) for name, nodes in FIXED.items()}
    return {**fixed, ADAPTING: replace(first, parameters={**placed, "reconfiguration_policy": "forecast"})}


def _run(setup: Setup) -> Run:
    return run(setup, in_phases(STRETCHES, grace_s=0))


def document(shifting: Shifting) -> dict[str, Any]:
    """As JSON takes it."""
    return {
        name: {
            "mean_ttft_s": each.whole.mean_s,
            "switches": each.switches,
            "parts_s": [part.mean_s for part in each.parts],
        }
        for name, each in shifting.items()
    }


def table(shifting: Shifting) -> Table:
    """Mean TTFT by part of the load, the changes of load included."""
    names = [each.name for each in in_phases(STRETCHES).parts]
    shown = Table(
        "mean TTFT, s",
        *names,
        "all",
        "switches",
        title="In virtual time: 40 GPUs, `vertumnus` placement",
        title_justify="left",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, each in shifting.items():
        parts = [f"{part.mean_s:.2f}" for part in each.parts]
        shown.add_row(name, *parts, f"{each.whole.mean_s:.3f}", str(each.switches))
    return shown
