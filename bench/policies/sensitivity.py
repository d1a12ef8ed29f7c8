"""What one policy's figures owe to each of its parameters, to wrong predictions, to chance, and to what serves."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.policies.comparing import At, Lengths, Side, Sides, changes, compared, table
from cli.simulating.plotting import bars, save
from services.worker.composer import StepLimits
from shared.model.cost import Coefficients
from shared.model.parameters import Parameters
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy

BASE = "as it is"
ORDERS: dict[str, Sequence[Any]] = {"worker_order": ("fcfs", "shortest-first")}
PARAMETERS: dict[str, dict[str, Sequence[Any]]] = {
    "paper": {"beta": (1, 2, 5, 8), "lam": (0, 0.05, 0.2, 0.5), **ORDERS},
    "vertumnus": {"adaptive_beta": (False,), "lam_vertumnus": (0, 0.1, 0.2, 0.5), **ORDERS},
    "least-work": ORDERS,
}
"""Those that a policy multiplies by. Rules of other systems have none, like `least-work`."""

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
    loads: Sequence[At], policy: Policy, vary: Sequence[str], setup: Setup, lengths: Lengths, jobs: int, kept: Path,
    out: Path | None,
) -> None:  # fmt: skip
    """A table for each load, and a picture: everything else as it is, on the same slices.

    Errors: ValueError for something else to vary.
    """
    if unknown := sorted(set(vary) - VARIED.keys()):
        raise ValueError(f"vary: {', '.join(unknown)} is not of {', '.join(VARIED)}")
    sides = [each._replace(name=f"{policy.name}: {each.name}") for each in variants(policy.of(setup), vary)]
    for at, of in compared(kept / "sensitivity.jsonl", loads, sides, lengths, jobs).items():
        found: Sides = {name.removeprefix(f"{policy.name}: "): runs for name, runs in of.items()}
        trace = Path(at.trace).stem
        title = f"{policy.name}, {trace} at {at.rate:g} requests/s, {setup.gpus} GPUs, {lengths.slices} slices"
        table(title, found, BASE)
        if out is not None:
            moved = {name: changes(runs, found[BASE], "mean_s") for name, runs in found.items() if name != BASE}
            save(bars(moved, "change of the mean TTFT", title), out, f"sensitivity_{policy.name}_{trace}")


def variants(base: Setup, vary: Sequence[str]) -> Iterator[Side]:
    """The setup as it is, and then with one thing changed at a time."""
    yield Side(BASE, base)
    for each in vary:
        yield from VARIED[each](base)


def _parameters(base: Setup) -> Iterator[Side]:
    policy = "least-work" if base.rule else base.parameters.get("placement_policy", Parameters().placement_policy)
    for name, values in PARAMETERS[policy].items():
        for value in values:
            if value != base.parameters.get(name):
                yield Side(f"{name} = {value}", _with(base, **{name: value}))


def _windows(base: Setup) -> Iterator[Side]:
    adapting = _with(base, reconfiguration_policy="paper")
    for window_s in (Parameters().window_s, *WINDOWS_S):
        yield Side(f"compositions by thresholds, H = {window_s} s", _with(adapting, window_s=window_s))


def _thresholds(base: Setup) -> Iterator[Side]:
    managed = _with(replace(base, cache_manager=True), cache_policy="paper")
    yield Side("prefixes by Algorithm 2, θ as by default", managed)
    for name, thresholds in THRESHOLDS.items():
        for theta in thresholds:
            yield Side(f"prefixes by Algorithm 2, {name} = {theta:g}", _with(managed, **{name: theta}))


def _predictions(base: Setup) -> Iterator[Side]:
    for share in WRONG_BY:
        truth = base.coefficients.scaled(1 + share)
        yield Side(f"steps take {share:+.0%} of what is predicted", replace(base, truth=truth))
        for name in COEFFICIENTS:
            believed = _off(base.coefficients, name, share)
            yield Side(f"{name} believed {share:+.0%}", replace(base, coefficients=believed, truth=base.coefficients))
    for noise in NOISES:
        yield Side(f"noise of {noise:.0%}", replace(base, noise_sd=noise))


def _serving(base: Setup) -> Iterator[Side]:
    for limits in STEPS:
        name = f"steps of {limits.step_tokens_max:,} tokens, chunks of {limits.chunk_tokens:,}"
        yield Side(name, replace(base, step_limits=limits))
    yield Side("whole prompts, one a step", replace(base, step_limits=STEPS[-1], step_items_max=1))
    for factor in MEMORY:
        memory = replace(base, blocks_per_rank=round(base.blocks_per_rank * factor))
        yield Side(f"{factor:g} times the KV memory", memory)


VARIED: dict[str, Callable[[Setup], Iterable[Side]]] = {
    "parameters": _parameters,
    "thresholds": _thresholds,
    "predictions": _predictions,
    "serving": _serving,
    "windows": _windows,
}
"""What there is to vary: β, λ and the order; θ; coefficients, times and noise; steps and memory; H."""


def _with(setup: Setup, **parameters: Any) -> Setup:
    return replace(setup, parameters={**setup.parameters, **parameters})


def _off(coefficients: Coefficients, name: str, share: float) -> Coefficients:
    wrong = {name: getattr(coefficients, name) * (1 + share), "version": f"{coefficients.version} {name} {share:+.0%}"}
    return coefficients.model_copy(update=wrong)
