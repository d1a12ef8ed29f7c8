"""Policies side by side: what each is called and sets, one run per seed, and figures with their spread."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from simulation.baselines.rules import RULES
from simulation.policies.outcome import Outcome, Rows
from simulation.policies.recorded import Recorded
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation, simulate
from simulation.policies.setup import Setup


class Policy(NamedTuple):
    """A placement policy of ours, by the parameters that make it, or a rule of another system on workers that serve in turn."""

    name: str
    parameters: Mapping[str, Any]
    rule: str | None = None

    def of(self, setup: Setup) -> Setup:
        """`setup` under this policy. What the setup changes on its own account stays changed."""
        return replace(setup, parameters={**self.parameters, **setup.parameters}, rule=self.rule)


FCFS = {"worker_order": "fcfs"}

OWN = {
    each.name: each
    for each in (
        Policy("paper", {"placement_policy": "paper", **FCFS}),
        Policy("paper, shortest first", {"placement_policy": "paper", "worker_order": "shortest-first"}),
        Policy("vertumnus", {"placement_policy": "vertumnus", "worker_order": "shortest-first"}),
        Policy("least-work", {"placement_policy": "least-work", **FCFS}),
    )
}


def policy(name: str) -> Policy:
    """By name. ValueError lists the names."""
    if name in RULES:
        return Policy(name, FCFS, rule=name)
    if name not in OWN:
        raise ValueError(f"policy: {name!r} is not one of {', '.join([*OWN, *RULES])}")
    return OWN[name]


class Run(NamedTuple):
    """One policy, one seed."""

    policy: str
    seed: int
    outcome: Outcome
    rows: Rows


Workload = Callable[[int], Iterable[Asked]]
"""The requests by seed; asked again they are the same."""


def compared(
    policies: Sequence[Policy], setup: Setup, workload: Workload, seeds: Sequence[int], warmup_s: float,
    progress: Callable[[str, int], None] = lambda _policy, _seed: None,
) -> list[Run]:  # fmt: skip
    """Every policy on the same requests, seed by seed. Errors: ValueError."""
    runs = []
    for seed in seeds:
        for each in policies:
            progress(each.name, seed)
            simulation = Simulation(replace(each.of(setup), seed=seed))
            outcome = simulation.run(workload(seed), warmup_s)
            runs.append(Run(each.name, seed, outcome, simulation.rows))
    return runs


class Spread(NamedTuple):
    """A figure over several runs. `sd` is 0 for one."""

    mean: float
    sd: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0)


FIGURES: dict[str, Callable[[Outcome], float | None]] = {
    "mean_s": lambda each: each.ttft.mean_s,
    "p50_s": lambda each: each.ttft.p50_s,
    "p90_s": lambda each: each.ttft.p90_s,
    "p99_s": lambda each: each.ttft.p99_s,
    "queue_s": lambda each: each.ttft.queue_mean_s,
    "short_mean_s": lambda each: each.short.mean_s if each.short else None,
    "long_mean_s": lambda each: each.long.mean_s if each.long else None,
    "attainment": lambda each: each.attainment,
    "hit_rate": lambda each: each.hit_rate,
    "utilisation": lambda each: each.utilisation,
    "unserved": lambda each: float(each.unserved),
}
"""What tables show of a run; None where there is nothing to show."""


def figures(outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Each of `FIGURES` that all of the runs have."""
    found: dict[str, Spread] = {}
    for name, figure in FIGURES.items():
        values = [value for each in outcomes if (value := figure(each)) is not None]
        if len(values) == len(outcomes):
            found[name] = spread(values)
    return found


def changes(outcomes: Sequence[Outcome], base: Sequence[Outcome], figure: str = "mean_s") -> Spread:
    """By how much of the base's, run by run: -0.1 is a tenth less."""
    pairs = [(FIGURES[figure](one), FIGURES[figure](other)) for one, other in zip(outcomes, base, strict=True)]
    return spread([one / other - 1 for one, other in pairs if one is not None and other])


class Comparison(NamedTuple):
    """A recorded run simulated, and an alternative on the same arrivals, seed by seed."""

    as_recorded: list[Outcome]
    alternative: list[Outcome]


def against_recorded(recorded: Recorded, alternative: Setup, seeds: Sequence[int]) -> Comparison:
    """Errors: ValueError if the alternative cannot be."""
    runs = [
        [simulate(replace(setup, seed=seed), recorded.requests, recorded.warmup_s) for seed in seeds]
        for setup in (recorded.setup, alternative)
    ]
    return Comparison(*runs)
