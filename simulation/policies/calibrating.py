"""What the cache manager's thresholds should be, by a window of real arrivals (model, 2.4).

1.  *Look.* The window runs once with caches left to themselves, and every scan's statistics are kept: what a pair (prefix,
    degree) is asked for per copy, and what is lost where nobody holds it. Their quantiles are what thresholds can mean here.
    How long prefixes stay wanted is H, over which a copy has to pay; what a block takes to copy is the least it must be worth.
2.  *Try.* Each value runs on the same arrivals, one parameter at a time on top of the best so far, and once more with caches
    left to themselves.
3.  *Choose* the least mean TTFT, if it is better than what is in force by `GAIN_MIN` in the mean and in every seed; else
    nothing changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from shared.contracts.envelope import Stored
from shared.contracts.events import CacheScanCompleted
from shared.contracts.ids import BlockId
from shared.model.parameters import Parameters
from simulation.policies.outcome import Outcome
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation, simulate
from simulation.policies.setup import Setup
from simulation.policies.studies import FIGURES, Spread, changes

GAIN_MIN = 0.01

QUANTILES = (0.5, 0.8, 0.95)
"""Of what was seen, as thresholds: half of it asks for a copy, a fifth, a twentieth."""

LOOKED_AT_MAX = 500
"""The most demanded nodes of a scan."""

SCANS_MAX = 10_000

USES_MIN = 3
"""A prefix that was wanted less often says nothing of how long it stays wanted."""

RECLAIM_SHARE = 0.15
"""θ_reclaim of θ_intra, as the paper's defaults have it."""

FADE_SHARE = 0.5
"""How long a loss counts, of H: likewise."""


class Trial(NamedTuple):
    """Parameters to try, and where the values come from."""

    name: str
    parameters: Mapping[str, Any]
    why: str


class Tried(NamedTuple):
    """What came of one, by seed, and its change of the mean TTFT against what is in force."""

    trial: Trial
    outcomes: list[Outcome]
    change: Spread


class Calibrated(NamedTuple):
    """All that was tried, what is in force first. `chosen` is None if nothing is worth a change."""

    tried: list[Tried]
    chosen: Tried | None


@dataclass(slots=True)
class Seen:
    """Demand at a window's scans: accesses per copy of pairs that are asked for, missed seconds of pairs without a copy."""

    accesses: list[float] = field(default_factory=list)
    missed_s: list[float] = field(default_factory=list)
    scans: int = 0


def look(setup: Setup, requests: Sequence[Asked], warmup_s: float) -> Seen:
    """Run the window with caches left to themselves."""
    seen = Seen()

    def listen(stored: Stored) -> None:
        manager = simulation.control.manager
        if not isinstance(stored.data, CacheScanCompleted) or manager is None or seen.scans == SCANS_MAX:
            return
        seen.scans += 1
        for node, demand in manager.trie.hottest(LOOKED_AT_MAX):
            for copies, access, missed_s in zip(node.replicas, demand.access, demand.missed, strict=True):
                if copies and access:
                    seen.accesses.append(access / copies)
                elif missed_s and not copies:
                    seen.missed_s.append(missed_s)

    simulation = Simulation(_under(setup, {"cache_policy": "lru"}, watched=True), listen)
    simulation.run(requests, warmup_s)
    return seen


def wanted_s(requests: Sequence[Asked]) -> float | None:
    """H: the median time from the first to the last request for a first block that was asked for `USES_MIN` times or more."""
    first_and_last: dict[BlockId, tuple[int, int, int]] = {}
    for each in requests:
        if each.chain:
            began_ns, uses, _ = first_and_last.get(each.chain[0], (each.at_ns, 0, 0))
            first_and_last[each.chain[0]] = began_ns, uses + 1, each.at_ns
    spans = [last - began for began, uses, last in first_and_last.values() if uses >= USES_MIN]
    return median(spans) / 1e9 if spans else None


def calibrate(
    setup: Setup, requests: Sequence[Asked], warmup_s: float, seeds: Sequence[int],
    told: Callable[[Tried], None] = lambda _: None,
) -> Calibrated:  # fmt: skip
    """Errors: ValueError if the window has no request that could be served."""
    seen = look(setup, requests, warmup_s)
    tried: list[Tried] = []

    def attempt(trial: Trial) -> Tried:
        outcomes = [simulate(replace(_under(setup, trial.parameters), seed=seed), requests, warmup_s) for seed in seeds]
        tried.append(Tried(trial, outcomes, changes(outcomes, tried[0].outcomes if tried else outcomes)))
        told(tried[-1])
        return tried[-1]

    attempt(Trial("in force", {}, "the parameters of the window"))
    attempt(Trial("lru", {"cache_policy": "lru"}, "caches left to themselves"))
    for policy, steps in (("paper", paper_steps(seen)), ("regret", regret_steps(setup, wanted_s(requests)))):
        best = attempt(Trial(policy, {"cache_policy": policy}, "with the thresholds of the window"))
        for step in steps:
            others = [
                attempt(Trial(each.name, {**best.trial.parameters, **each.parameters}, each.why)) for each in step
            ]
            best = min([best, *others], key=_mean_s)
    best = min(tried, key=_mean_s)
    return Calibrated(tried, best if _is_better(best, tried[0]) else None)


def paper_steps(seen: Seen) -> Iterator[list[Trial]]:
    """θ_intra with θ_reclaim below it, then θ_inter."""
    if seen.accesses:
        yield [
            Trial(
                f"paper θ_intra {intra:g}",
                {"theta_intra": intra, "theta_reclaim": _rounded(RECLAIM_SHARE * intra)},
                f"{1 - share:.0%} of {len(seen.accesses):,} pairs were asked for more often per copy",
            )
            for share, intra in _quantiles(seen.accesses)
        ]
    if seen.missed_s:
        yield [
            Trial(
                f"paper θ_inter {inter:g} s",
                {"theta_inter": inter},
                f"{1 - share:.0%} of {len(seen.missed_s):,} pairs without a copy lost more",
            )
            for share, inter in _quantiles(seen.missed_s)
        ]


def regret_steps(setup: Setup, horizon_s: float | None) -> Iterator[list[Trial]]:
    """H with its fading, then the price of a block."""
    if horizon_s is not None:
        horizon_s = min(3_600.0, max(2.0, _rounded(horizon_s)))
        why = f"prefixes that were wanted {USES_MIN} times or more stay wanted for {horizon_s:g} s at the median"
        fade_s = max(1.0, _rounded(FADE_SHARE * horizon_s))
        yield [Trial(f"regret H {horizon_s:g} s", {"regret_horizon_s": horizon_s, "regret_fade_s": fade_s}, why)]
    megabytes_per_s = {**Parameters().model_dump(), **setup.parameters}["fetch_mb_per_s"]
    block_s = setup.block_tokens * setup.kv_bytes_per_token / (megabytes_per_s * 1e6)
    yield [
        Trial(
            f"regret price {price:g} s",
            {"copy_price_s": price},
            f"{times} times what a block takes at {megabytes_per_s:,} MB/s",
        )
        for times in (1, 4)
        if (price := min(10.0, _rounded(times * block_s))) > 0
    ]


def _under(setup: Setup, parameters: Mapping[str, Any], *, watched: bool = False) -> Setup:
    return replace(setup, parameters={**setup.parameters, **parameters}, cache_manager=watched)


def _is_better(one: Tried, other: Tried) -> bool:
    pairs = zip(one.outcomes, other.outcomes, strict=True)
    return -one.change.mean >= GAIN_MIN and all(ours.ttft.mean_s < theirs.ttft.mean_s for ours, theirs in pairs)


def _mean_s(tried: Tried) -> float:
    means = (FIGURES["mean_s"](each) for each in tried.outcomes)
    return sum(each for each in means if each is not None)


def _quantiles(values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Each share with its value, different ones only, as thresholds can be."""
    found: set[float] = set()
    for share in QUANTILES:
        value = max(0.01, _rounded(float(np.quantile(values, share))))
        if value not in found:
            found.add(value)
            yield share, value


def _rounded(value: float) -> float:
    """To two digits: an operator reads it."""
    return float(f"{value:.2g}")
