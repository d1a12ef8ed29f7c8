"""Does the simulator say what the system does? `python -m bench.validity [--minutes 10] [--speedup 5] [--model-dir DIR]`.

Two made-up traces (conversation, then tool-agent) are served by a real system: router, controller, cache manager, ledger and
agents on NATS and Postgres, 40 modelled GPUs, `--speedup` times as fast as life. What the system recorded is then simulated.
On the first trace are fitted: each node's measured over predicted time, its spread from step to step, and what a first token
takes in the mean beside queue and prefill. With these the second trace is simulated, and compared.

Everything that is real takes real time: at a speedup of 5 a millisecond of the services counts as five of the pool's, so the
fitted constant grows with the speedup, and so does what one constant cannot say. Seconds below are the pool's.

With `--model-dir` the torch engine is asked as well: coefficients are fitted on every other shape of a grid of prefills on
this machine's CPUs, and the shapes between are predicted.
"""

import argparse
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import httpx

from bench.policies.showing import conditions
from cli.demo.halves import Half, scale
from cli.demo.running import served, settled_audit
from cli.demo.stage import Stage
from cli.embedded.data_dir import DataDir, RunningSystem
from cli.profiling.profiling import Order, profiled
from replay.verifying import EVERYTHING, Span
from services.worker.settings import WorkerSettings
from shared.model.cost import US_PER_S
from shared.model.fitting import fit, relative_errors
from shared.runtime.clock import SystemClock
from simulation.policies.recorded import Recorded, recorded_run
from simulation.policies.run import simulate
from simulation.policies.setup import Setup
from simulation.policies.studies import figures
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.rows import Row

SEEDS = range(1, 6)
GOAL = 0.05
FIT, COMPARE = "conversation", "tool-agent"
RATES = {FIT: 5.0, COMPARE: 8.0}
HASH_IDS_APART = 1 << 40
"""The second trace's ids begin here, or its prompts would be the first one's."""

TORCH_LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1_024)


def rows_of(shape: str, seconds: float, first_id: int) -> list[Row]:
    """`seconds` of a made-up trace, at its rate here."""
    made = generated([Phase(seconds, RATES[shape], SHAPES[shape])], Random(1))
    fitting = (row for row in made if row.prompt_tokens <= scale().prompt_tokens_max)
    return [row._replace(output_tokens=1, hash_ids=tuple(each + first_id for each in row.hash_ids)) for row in fitting]


def half_at(speedup: float) -> Half:
    """The demo's modelled pool at another speed."""
    half = scale()
    own = {name: dict(settings) for name, settings in half.choices.settings.items()}
    own["router"]["speedup"] = own["worker"]["speedup"] = str(speedup)
    return half._replace(speedup=speedup, choices=replace(half.choices, settings=own))


POLICIES = {"reconfiguration_policy": "off", "placement_policy": "paper", "cache_policy": "lru"}
"""What is compared is one pool from beginning to end, under the policies that the published table was taken with."""


def set_policies(system: RunningSystem) -> None:
    """As an operator would."""
    url, key = system.services["controller"].url, system.operator_key_file.read_text().strip()
    asked = {"asked_by": "bench", "reason": "validity", "changes": POLICIES}
    answer = httpx.post(f"{url}/v1/operator/parameters", json=asked, headers={"Authorization": f"Bearer {key}"})
    answer.raise_for_status()


def recorded_runs(minutes: float, speedup: float) -> dict[str, Recorded]:
    """Each trace as the system recorded it."""
    half, clock, spans = half_at(speedup), SystemClock(), dict[str, Span]()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(half, DataDir(Path(folder)), print, threading.Event())
        with stage.running() as system:
            set_policies(system)
            answered = 0
            for number, shape in enumerate((FIT, COMPARE)):
                rows = [
                    row._replace(arrival_ms=row.arrival_ms / speedup)
                    for row in rows_of(shape, 60 * minutes, HASH_IDS_APART * number)
                ]
                began_ns = clock.now_ns()
                report = stage.wait(served(half, rows, system, lambda _row, _outcome: None))
                spans[shape] = EVERYTHING._replace(from_ns=began_ns, to_ns=clock.now_ns())
                print(f"{shape}: {report.ok:,} answered, {report.refused + report.failed} not; {conditions()}")
                answered += report.ok
                stage.wait(settled_audit(system.database_url, answered))
            return {
                shape: stage.wait(recorded_run(system.database_url, span, lambda _events: None))
                for shape, span in spans.items()
            }


def fitted(recorded: Recorded, on: Recorded) -> Setup:
    """`recorded`'s pool, with what was fitted on the other run."""
    return replace(
        recorded.setup, stragglers=on.setup.stragglers, noise_sd=on.setup.noise_sd, dispatch_s=on.setup.dispatch_s
    )


def compare(name: str, recorded: Recorded, setup: Setup, speedup: float) -> bool:
    """Print both, and whether mean and P90 agree."""
    simulated = [simulate(replace(setup, seed=seed), recorded.requests, recorded.warmup_s) for seed in SEEDS]
    found, real = figures(simulated), figures([recorded.outcome])
    print(f"\n{name}: {recorded.outcome.ttft.requests:,} requests, {len(SEEDS)} seeds, seconds of the pool")
    for figure in ("mean_s", "p50_s", "p90_s", "p99_s"):
        was, is_, sd = (speedup * each for each in (real[figure].mean, found[figure].mean, found[figure].sd))
        print(f"  TTFT {figure[:-2]:4} system {was:7.3f}  simulator {is_:7.3f} ±{sd:.3f}  error {is_ / was - 1:+.1%}")
    for figure in ("hit_rate", "utilisation"):
        print(f"  {figure:11} system {real[figure].mean:6.1%}  simulator {found[figure].mean:6.1%}")
    print("".join(f"  note: {note}\n" for note in recorded.notes), end="")
    return all(abs(found[figure].mean / real[figure].mean - 1) <= GOAL for figure in ("mean_s", "p90_s"))


def told_fit(setup: Setup, speedup: float) -> None:
    """What was fitted."""
    ratios = ", ".join(f"{node} {ratio:.3f}" for node, ratio in setup.stragglers.items())
    print(f"\nfitted on {FIT}: measured over predicted {ratios}; noise {setup.noise_sd:.1%}; ", end="")
    print(
        f"{1_000 * setup.dispatch_s:.1f} ms beside queue and prefill, {1_000 * speedup * setup.dispatch_s:.1f} ms of the pool's"
    )


def torch_prefills(model_dir: Path, degrees: tuple[int, ...], budget_s: float) -> None:
    """Fit on every other shape, predict the others."""
    settings = WorkerSettings(
        engine="torch",
        model_dir=model_dir,
        prefill_ranks=max(degrees),
        decode_ranks=0,
        block_tokens=16,
        blocks_per_rank=512,
    )
    order = Order(settings, degrees, TORCH_LENGTHS, (0.0, 0.5), warmups=1, repeats=3, budget_s=budget_s, seed=1)
    profile, measured = profiled(order, lambda _cell, _count: None)
    samples = [point.sample for point in measured.points]
    shapes = sorted({sample[1:3] for sample in samples}, key=lambda shape: (sum(shape), shape))
    known = [sample for sample in samples if shapes.index(sample[1:3]) % 2 == 0]
    unseen = [sample for sample in samples if shapes.index(sample[1:3]) % 2]
    chosen = fit(known, "with g")
    print(
        f"\n{profile.model} on {profile.device}: {len(known)} prefills fitted, {len(unseen)} others predicted; {conditions()}"
    )
    for degree in degrees:
        own = [sample for sample in unseen if sample.degree == degree]
        errors = relative_errors(own, chosen.coefficients)
        absolute = abs(errors)
        print(
            f"  degree {degree}: MAPE {absolute.mean():.1%}, worst {absolute.max():.1%}, median {median(errors):+.1%}"
        )
        for sample in own:
            predicted_s = chosen.coefficients.prefill_us(*sample[:3]) / US_PER_S
            shape = f"{sample.uncached_tokens:5} tokens after {sample.cached_tokens:5}"
            print(f"    {shape}: measured {sample.seconds:.3f} s, predicted {predicted_s:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="of each trace, in the pool's time")
    parser.add_argument("--speedup", type=float, default=5)
    parser.add_argument("--model-dir", type=Path, help="a Hugging Face directory, for the torch engine")
    parser.add_argument("--torch-budget-s", type=float, default=240)
    asked = parser.parse_args()
    runs = recorded_runs(asked.minutes, asked.speedup)
    told_fit(runs[FIT].setup, asked.speedup)
    compare(f"{FIT}, fitted on itself", runs[FIT], runs[FIT].setup, asked.speedup)
    agrees = compare(f"{COMPARE}, fitted on {FIT}", runs[COMPARE], fitted(runs[COMPARE], runs[FIT]), asked.speedup)
    print(f"mean and P90 {'agree' if agrees else 'do not agree'} within {GOAL:.0%}")
    if asked.model_dir is not None:
        torch_prefills(asked.model_dir, (1, 2), asked.torch_budget_s)


if __name__ == "__main__":
    main()
