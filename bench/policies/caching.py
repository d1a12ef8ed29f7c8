"""The cache manager on and off over load (the shape of the paper's Figure 14), under each placement that is given.

Equal capacity for each worker whoever manages: `lru` leaves the caches to the workers; the others are compared with it. The
workload is stated before anything is tuned: `Drift`, at rates that keep the workers busy for 75 to 85 % of the time with `lru`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.policies.comparing import At, Lengths, Side, Sides, compared, over, table
from cli.simulating.plotting import lines, save
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy

MANAGERS: Mapping[str, Mapping[str, Any]] = {
    "lru": {"cache_policy": "lru"},
    "paper": {"cache_policy": "paper"},
    "regret": {"cache_policy": "regret", "scan_every_s": 0.5},
}


def caching(
    loads: Sequence[At], policies: Sequence[Policy], setup: Setup, lengths: Lengths, jobs: int, kept: Path,
    out: Path | None,
) -> None:  # fmt: skip
    """Every manager on the same requests; a table for each load, and a picture for each policy."""
    for policy in policies:
        told = ", ".join([policy.name, *(f"{name} {value}" for name, value in setup.parameters.items())])
        sides = [Side(f"{told}: {name}", _managed(policy.of(setup), name)) for name in MANAGERS]
        found: dict[At, Sides] = {}
        for at, of in compared(kept / "caching.jsonl", loads, sides, lengths, jobs).items():
            found[at] = {name.removeprefix(f"{told}: "): runs for name, runs in of.items()}
            table(f"{Path(at.trace).stem} at {at.rate:g} requests/s, {lengths.slices} slices, {told}", found[at], "lru")
        if out is not None:
            panels = {
                Path(trace).stem: over(found, trace, "mean_s") for trace in dict.fromkeys(at.trace for at in loads)
            }
            picture = lines(panels, "requests/s", "TTFT mean, s", f"managers of caches, {told}", logarithmic=False)
            save(picture, out, f"caching_{policy.name}")


def _managed(setup: Setup, manager: str) -> Setup:
    parameters = {**setup.parameters, **MANAGERS[manager]}
    return replace(setup, parameters=parameters, cache_manager=manager != "lru")
