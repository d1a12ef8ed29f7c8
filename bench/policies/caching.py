"""The cache manager on and off over load (the shape of the paper's Figure 14), under each placement that is given.

Equal capacity for each worker whoever manages: `lru` leaves the caches to the workers; the others are compared with it. The
workload is stated before anything is tuned: `Drift`, at rates that keep the workers busy for 75 to 85 % of the time with `lru`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from bench.policies.showing import document, table
from bench.policies.workloads import BLOCK_TOKENS, Source
from simulation.policies.arrivals import requests_of
from simulation.policies.outcome import Outcome
from simulation.policies.run import simulate
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, figures
from simulation.workloads.drifting import Drift, drifting

MANAGERS: Mapping[str, Mapping[str, Any]] = {
    "lru": {"cache_policy": "lru"},
    "paper": {"cache_policy": "paper"},
    "regret": {"cache_policy": "regret", "scan_every_s": 0.5},
}


def caching(
    sources: Sequence[Source], policies: Sequence[Policy], rates: Sequence[float], setup: Setup, slices: int, limit: int,
    warmup_s: float, out: Path | None,
) -> None:  # fmt: skip
    """Every manager on the same requests: prefixes that drift at each rate if no trace is given, else slices of the traces."""
    found: dict[str, Any] = {}
    for name in [each.name for each in sources] or ["drifting"]:
        for policy in policies:
            for rate in rates:
                cell = {
                    manager: [
                        _one(setup, policy, parameters, _arrivals(sources, name, rate, number, slices, limit), warmup_s)
                        for number in range(slices)
                    ]
                    for manager, parameters in MANAGERS.items()
                }
                title = (
                    f"{name} at {rate:g} requests/s, placement {policy.name}: TTFT in s, mean ± sd over {slices} runs"
                )
                table(title, "cache manager", cell, "lru")
                found[f"{name} {policy.name} {rate:g}"] = {each: figures(outcomes) for each, outcomes in cell.items()}
    document(out, "caching", found)


def _one(setup: Setup, policy: Policy, parameters: Mapping[str, Any], requests: Any, warmup_s: float) -> Outcome:
    of = policy.of(setup)
    managed = replace(of, parameters={**of.parameters, **parameters}, cache_manager=parameters["cache_policy"] != "lru")
    return simulate(managed, requests, warmup_s)


def _arrivals(sources: Sequence[Source], name: str, rate: float, number: int, slices: int, limit: int) -> Any:
    if not sources:
        return islice(requests_of(drifting(Random(number), Drift(requests_per_s=rate)), BLOCK_TOKENS), limit)
    [source] = [each for each in sources if each.name == name]
    return source.slice(number, slices, rate, limit, seed=number)
