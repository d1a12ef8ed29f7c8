"""How a forecast's replay of a stretch compares pools, beside how they compare in the simulator on the very same requests.

Fixed compositions serve the phased load. The requests of stretches of two minutes, as a forecast sees them, are replayed on all
of them at several rates. The error is ln(replayed TTFT / that of the base) - ln(served TTFT / that of the base): the mean over
the stretches is a rate's bias towards a pool, the root mean square what a forecast may be wrong by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from bench.policies.adapting import FIXED, load_of
from bench.policies.showing import markdown
from services.controller import forecast, replaying
from services.controller.arrivals import HISTORY_NS, Arrival
from services.controller.forecast import Question
from shared.contracts.ids import RequestId
from shared.model.parameters import Parameters
from simulation.policies.adapting import BLOCK_TOKENS
from simulation.policies.arrivals import requests_of
from simulation.policies.outcome import Rows
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.policies.studies import Policy

BASE, OTHERS = "6 CP4, 2 CP8", ("10 CP4", "4 CP4, 3 CP8", "2 CP4, 4 CP8")
RATES_PERCENT = (90, 95, 100, 105, 110, 115, 120, 130)
STRETCH_S = HISTORY_NS // 10**9

Served = Mapping[str, npt.NDArray[np.int64]]


def replays(policies: Sequence[Policy], setup: Setup, seed: int, jobs: int) -> None:
    """A table for each placement."""
    for policy in policies:
        of = replace(policy.of(setup), seed=seed)
        with get_context("spawn").Pool(jobs) as pool:
            runs = dict(zip((BASE, *OTHERS), pool.map(partial(served, of), (BASE, *OTHERS), chunksize=1), strict=True))
            phases = [(round(each.begin_s) - 60, round(each.end_s)) for each in load_of("phased", 1.0).parts]
            ends = [end for begin, stop in phases for end in range(begin + STRETCH_S, stop + 1, STRETCH_S)]
            errors_SRP = np.array(pool.map(partial(_errors, of, runs), ends, chunksize=1))
        bias_RP, error_RP = errors_SRP.mean(axis=0), np.sqrt((errors_SRP**2).mean(axis=0))
        print(f"\n`{policy.name}`, seed {seed}, {len(ends)} stretches; against {BASE}\n")
        pairs = zip(RATES_PERCENT, bias_RP, error_RP, strict=True)
        rows = [
            [f"{rate} %", *(f"{b:+.1%}, {e:.1%}" for b, e in zip(bias_P, error_P, strict=True))]
            for rate, bias_P, error_P in pairs
        ]
        markdown(["replayed at: bias, error", *OTHERS], rows)


def served(setup: Setup, name: str) -> Served:
    """What a composition made of the load, in whichever process."""
    simulation = Simulation(replace(setup, compositions=FIXED[name]))
    simulation.run(requests_of(load_of("phased", 1.0).rows(setup.seed), BLOCK_TOKENS))
    columns = {column: simulation.rows.column(column) for column in Rows.COLUMNS}
    order = np.argsort(columns["arrival_us"], kind="stable")
    return {column: values[order] for column, values in columns.items()}


def _errors(setup: Setup, runs: Mapping[str, Served], end_s: int) -> npt.NDArray[np.float64]:
    """By rate and pool, of the stretch that ends there; what the base had cached is what is replayed as cached."""
    counted_s = end_s - STRETCH_S + STRETCH_S // replaying.WARM_SHARE
    true_s = [_part(runs[name], counted_s, end_s)["ttft_us"].mean() for name in (BASE, *OTHERS)]
    part = _part(runs[BASE], end_s - STRETCH_S, end_s)
    arrivals = [
        Arrival(int(at_us) * 1_000, RequestId(str(number)), int(tokens - cached), int(cached))
        for number, (at_us, tokens, cached) in enumerate(
            zip(part["arrival_us"], part["prompt_tokens"], part["cached_tokens"], strict=True)
        )
    ]
    pools = tuple(tuple(sorted((c for node in FIXED[name] for c in node), reverse=True)) for name in (BASE, *OTHERS))
    rule = forecast.rule(Parameters.model_validate(dict(setup.parameters)))
    question = Question(forecast.sampled(arrivals), pools, setup.coefficients, rule)
    replayed_ARP = replaying.replayed(question, RATES_PERCENT)
    replayed_RP = replayed_ARP[len(replayed_ARP) // replaying.WARM_SHARE :].mean(axis=0)
    errors_RP = np.log(replayed_RP / replayed_RP[:, :1]) - np.log(np.array(true_s) / true_s[0])
    return np.asarray(errors_RP[:, 1:], dtype=np.float64)


def _part(of: Served, begin_s: int, end_s: int) -> Served:
    counted = (of["arrival_us"] >= begin_s * 1e6) & (of["arrival_us"] < end_s * 1e6)
    return {column: values[counted] for column, values in of.items()}
