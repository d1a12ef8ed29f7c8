"""What several routers cost in TTFT, by the age of what each knows of the others' work, with and without stealing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench.policies.comparing import At, Lengths, Side, compared, table
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy

ONE = "1 router"


def replicas(
    loads: Sequence[At], policy: Policy, routers: Sequence[int], ages_s: Sequence[float], setup: Setup, lengths: Lengths,
    jobs: int, kept: Path,
) -> None:  # fmt: skip
    """Two tables for each load: requests go to routers by turns, and one router alone is what the others are compared with."""
    sides = [each for stealing in (True, False) for each in _sides(policy, routers, ages_s, setup, stealing)]
    for at, of in compared(kept / "replicas.jsonl", loads, sides, lengths, jobs).items():
        for stealing in (True, False):
            end = _end(stealing)
            title = f"{Path(at.trace).stem} at {at.rate:g} requests/s, {setup.gpus} GPUs, {policy.name}{end}"
            found = {name.removesuffix(end): runs for name, runs in of.items() if name.endswith(end)}
            table(title, found, ONE)


def _sides(
    policy: Policy, routers: Sequence[int], ages_s: Sequence[float], setup: Setup, stealing: bool
) -> Iterator[Side]:
    plain = policy.of(setup)
    alone = replace(plain, parameters={**plain.parameters, "stealing": stealing})
    yield Side(ONE + _end(stealing), alone)
    for many, age_s in product(routers, ages_s):
        name = f"{many} routers, {age_s * 1_000:g} ms"
        yield Side(name + _end(stealing), replace(alone, routers=many, view_age_s=age_s))


def _end(stealing: bool) -> str:
    return f", {'with' if stealing else 'without'} stealing"
