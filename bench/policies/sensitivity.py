"""What one policy's figures owe to each of its parameters, to wrong coefficients and to chance."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.policies.showing import document, table
from bench.policies.workloads import Source
from services.worker.composer import StepLimits
from shared.model.cost import Coefficients
from shared.model.parameters import Parameters
from simulation.policies.run import simulate
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy, figures

BASE = "as it is"
PARAMETERS: dict[str, Sequence[Any]] = {
    "beta": (1, 2, 5, 8),
    "lam": (0, 0.05, 0.2, 0.5),
    "worker_order": ("fcfs", "shortest-first"),
}
WINDOWS_S = (5, 10, 40, 80)
"""H, where the paper's thresholds change compositions after each window."""
THRESHOLDS = {"theta_inter": (0.1, 1.0), "theta_intra": (1.0, 4.0), "theta_reclaim": (0.1, 0.6)}
"""θ, where the paper's Algorithm 2 copies and reclaims prefixes."""
WRONG_BY = (-0.4, 0.4)
COEFFICIENTS = ("d", "a", "c", "alpha")
NOISES = (0.0, 0.2, 0.4)
STEPS = (StepLimits(2_048, 2_048), StepLimits(8_192, 4_096), StepLimits(1 << 20, 1 << 20))
MEMORY = (0.25, 4.0)


def sensitivity(
    source: Source,
    policy: Policy,
    rate: float,
    setup: Setup,
    slices: int,
    limit: int,
    warmup_s: float,
    out: Path | None,
) -> None:
    """One table: everything else as it is, on the same slices."""
    outcomes = {
        name: [
            simulate(replace(each, seed=number), source.slice(number, slices, rate, limit, seed=number), warmup_s)
            for number in range(slices)
        ]
        for name, each in _variants(policy, setup)
    }
    where = f"{source.name} at {rate:g} requests/s on {setup.gpus} GPUs"
    title = f"{policy.name}, {where}: TTFT in s, mean ± sd over {slices} slices"
    table(title, "changed", outcomes, BASE)
    document(out, "sensitivity", {name: figures(each) for name, each in outcomes.items()})


def _variants(policy: Policy, setup: Setup) -> Iterator[tuple[str, Setup]]:
    base = policy.of(setup)
    yield BASE, base
    for name, values in PARAMETERS.items():
        for value in values:
            if value != base.parameters.get(name):
                yield f"{name} = {value}", _with(base, **{name: value})
    adapting = _with(base, reconfiguration_policy="paper")
    yield f"compositions by thresholds, H = {Parameters().window_s} s", adapting
    for window_s in WINDOWS_S:
        yield f"compositions by thresholds, H = {window_s} s", _with(adapting, window_s=window_s)
    managed = _with(replace(base, cache_manager=True), cache_policy="paper")
    yield "prefixes by Algorithm 2, θ as by default", managed
    for name, thresholds in THRESHOLDS.items():
        for theta in thresholds:
            yield f"prefixes by Algorithm 2, {name} = {theta:g}", _with(managed, **{name: theta})
    for share in WRONG_BY:
        truth = base.coefficients.scaled(1 + share)
        yield f"steps take {share:+.0%} of what is predicted", replace(base, truth=truth)
        for name in COEFFICIENTS:
            believed = _off(base.coefficients, name, share)
            yield f"{name} believed {share:+.0%}", replace(base, coefficients=believed, truth=base.coefficients)
    for limits in STEPS:
        yield (
            f"steps of {limits.step_tokens_max:,} tokens, chunks of {limits.chunk_tokens:,}",
            replace(base, step_limits=limits),
        )
    yield "whole prompts, one a step", replace(base, step_limits=STEPS[-1], step_items_max=1)
    for factor in MEMORY:
        yield f"{factor:g} times the KV memory", replace(base, blocks_per_rank=round(base.blocks_per_rank * factor))
    for noise in NOISES:
        yield f"noise of {noise:.0%}", replace(base, noise_sd=noise)


def _with(setup: Setup, **parameters: Any) -> Setup:
    return replace(setup, parameters={**setup.parameters, **parameters})


def _off(coefficients: Coefficients, name: str, share: float) -> Coefficients:
    wrong = {name: getattr(coefficients, name) * (1 + share), "version": f"{coefficients.version} {name} {share:+.0%}"}
    return coefficients.model_copy(update=wrong)
