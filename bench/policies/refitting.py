"""What wrong coefficients cost in TTFT, and how much of it each mechanism takes back: the ratio of each worker, in all of a
price or in the request's own time alone (`ratio_in_own_time`), and coefficients that are fitted anew (`refit`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.policies.comparing import At, Lengths, Side, compared, table
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy

SLOWER = 1.6
BELIEVED = {"a": 0.25, "c": 1.0, "alpha": 4.0}
"""A set that is wrong in its shape: each by this factor."""

RIGHT = "coefficients that are right"

NOTHING, ALL, OWN = (
    {"calibration": on, "ratio_in_own_time": own} for on, own in ((False, False), (True, False), (True, True))
)
REMEDIES = {
    "nothing": NOTHING,
    "ratios in all": ALL,
    "ratios": OWN,
    "a refit": {**NOTHING, "refit": True},
    "ratios and a refit": {**OWN, "refit": True},
}


def refitting(loads: Sequence[At], policy: Policy, setup: Setup, lengths: Lengths, jobs: int, kept: Path) -> None:
    """A table for each load; what is right is what the others are compared with."""
    for at, of in compared(kept / "refit.jsonl", loads, [*_sides(policy.of(setup))], lengths, jobs).items():
        table(f"{Path(at.trace).stem} at {at.rate:g} requests/s, {setup.gpus} GPUs, {policy.name}", of, RIGHT)


def _sides(right: Setup) -> Iterator[Side]:
    yield Side(RIGHT, _with(right, NOTHING))
    for name in ("ratios in all", "ratios", "ratios and a refit"):
        yield Side(f"{RIGHT}: {name}", _with(right, REMEDIES[name]))
    slow = next(iter(right.nodes))
    believed = right.coefficients.model_copy(
        update={name: getattr(right.coefficients, name) * factor for name, factor in BELIEVED.items()}
    )
    wrong = {
        f"{slow} takes {SLOWER:g} times as long": replace(right, stragglers={slow: SLOWER}),
        f"all take {SLOWER:g} times as long": replace(right, truth=right.coefficients.scaled(SLOWER)),
        "wrong in shape": replace(right, coefficients=believed, truth=right.coefficients),
    }
    for name, setup in wrong.items():
        for by, parameters in REMEDIES.items():
            yield Side(f"{name}: {by}", _with(setup, parameters))


def _with(setup: Setup, parameters: Mapping[str, object]) -> Setup:
    return replace(setup, parameters={**setup.parameters, **parameters})
