"""What a tenant's flood does to another tenant, with and without shares of the workers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.policies.showing import document
from cli.terminal import output
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, spread
from simulation.policies.tenants import FLOODING, OTHER, Tenant, Told, flooded

SHARING: dict[str, Any] = {"tenants": {FLOODING: {}, OTHER: {}}}


def tenants(
    policies: Sequence[Policy], setup: Setup, rates: tuple[float, float, float], seconds: float, seeds: int, out: Path | None
) -> None:  # fmt: skip
    """`rates` are the other tenant's, and the flooding one's before and during its flood, in requests/s."""
    other, before, during = rates
    found: dict[str, dict[str, list[tuple[Told, Told, Told]]]] = {}
    for policy in policies:
        plain = policy.of(setup)
        shared = replace(plain, parameters={**plain.parameters, **SHARING})
        for name, each in (("none", plain), ("by weight", shared)):
            runs = []
            for seed in range(seeds):
                calm = flooded(each, [Tenant(FLOODING, before), Tenant(OTHER, other)], seconds, seed)
                flood = flooded(each, [Tenant(FLOODING, during), Tenant(OTHER, other)], seconds, seed)
                runs.append((calm[OTHER], flood[OTHER], flood[FLOODING]))
            found.setdefault(policy.name, {})[name] = runs
    title = (
        f"another tenant at {other:g} requests/s on {setup.gpus} GPUs; a flood from {before:g} to {during:g}: P90 TTFT"
    )
    shown = Table("policy", "shares", "before", "flood", "change", "flood served", title=title, title_justify="left")
    for policy_name, of in found.items():
        for name, runs in of.items():
            shown.add_row(policy_name, name, *_cells(runs))
    output().print(shown)
    document(out, "tenants", found)


def _cells(runs: Sequence[tuple[Told, Told, Told]]) -> list[str]:
    before, during = (spread([run[index].p90_s for run in runs]) for index in (0, 1))
    change = spread([flood.p90_s / calm.p90_s - 1 for calm, flood, _ in runs])
    served = spread([run[2].served / run[2].requests for run in runs])
    return [
        f"{before.mean:.3f} ±{before.sd:.3f} s",
        f"{during.mean:.3f} ±{during.sd:.3f} s",
        f"{change.mean:+.1%} ±{100 * change.sd:.1f}",
        f"{served.mean:.1%}",
    ]
