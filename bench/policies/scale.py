"""What the code costs as the pool grows, and how fast the simulator is: seconds of a processor, not of a model."""

import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from rich.table import Table

from bench.policies.showing import conditions, document
from cli.simulating.plotting import lines, save
from cli.terminal import output
from services.router.decider import Arrival, Moment, State
from shared.contracts.envelope import EventData
from simulation.policies.arrivals import requests_of
from simulation.policies.deciding import Deciding
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.policies.studies import Spread, policy
from simulation.workloads.generating import SHAPES, Phase, generated

REQUESTS_PER_GPU_S = 5 / 40
BLOCKS_PER_RANK = 128
"""Less than a GPU has: the index of ten thousand whole ones does not fit a small machine, and is not what is measured."""

DAY_S, DAY_RATE, SAMPLES = 86_400, 6.0, 12


class Cost(NamedTuple):
    """Of one run. CPU seconds; `peak_mb` is the process's."""

    gpus: int
    workers: int
    requests: int
    requests_per_s: float
    events_per_s: float
    decision_us: float
    peak_mb: float


PICTURED = {"decision_us": "a decision, µs", "events_per_s": "events/s", "peak_mb": "peak memory, MB"}


class _Timed:
    """A decider that says what its decisions took."""

    def __init__(self, deciding: Deciding) -> None:
        self._deciding = deciding
        self.evolve, self.assign_again = deciding.evolve, deciding.assign_again
        self.seconds = 0.0
        self.count = 0

    def receive(self, state: State, arrival: Arrival, moment: Moment) -> list[EventData]:
        began_s = time.process_time()
        facts = self._deciding.receive(state, arrival, moment)
        self.seconds += time.process_time() - began_s
        self.count += 1
        return facts


def scale(sizes: Sequence[int], name: str, setup: Setup, requests: int, out: Path | None) -> None:
    """A table: load grows with the pool. Each size in a process of its own, for the sake of the memory."""
    shown = Table("GPUs", "workers", "requests", "simulated/s", "events/s", "decision, µs", "peak, MB", title_justify="left",
                  title=f"{name}: CPU seconds, {conditions()}")  # fmt: skip
    costs = []
    for gpus in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
            cost = processes.submit(measured, gpus, name, setup, requests).result()
        costs.append(cost)
        shown.add_row(f"{cost.gpus:,}", f"{cost.workers:,}", f"{cost.requests:,}", f"{cost.requests_per_s:,.0f}",
                      f"{cost.events_per_s:,.0f}", f"{cost.decision_us:,.0f}", f"{cost.peak_mb:,.0f}")  # fmt: skip
    output().print(shown)
    document(out, "scale", [cost._asdict() for cost in costs])
    if out is not None:
        panels = {
            label: {name: {float(cost.gpus): Spread(getattr(cost, figure), 0) for cost in costs}}
            for figure, label in PICTURED.items()
        }
        picture = lines(panels, "GPUs", "", "CPU seconds and memory by the size of the pool", logarithmic=True)
        for axis in picture.axes:
            axis.set_xscale("log")
        save(picture, out, "scale")


def measured(gpus: int, name: str, setup: Setup, requests: int) -> Cost:
    """One size: the setup's nodes over and over."""
    own = setup.compositions
    compositions = tuple(own[index % len(own)] for index in range(gpus * len(own) // setup.gpus))
    simulation = Simulation(policy(name).of(replace(setup, compositions=compositions, blocks_per_rank=BLOCKS_PER_RANK)))
    timed = _Timed(simulation.routers.routers[0].deciding)
    simulation.routers.routers = tuple(each._replace(deciding=timed) for each in simulation.routers.routers)
    rate = gpus * REQUESTS_PER_GPU_S
    arrivals = list(_made_up(requests / rate, rate))
    began_s = time.process_time()
    simulation.run(arrivals)
    took_s = time.process_time() - began_s
    return Cost(
        gpus=simulation.setup.gpus,
        workers=sum(map(len, compositions)),
        requests=len(arrivals),
        requests_per_s=len(arrivals) / took_s,
        events_per_s=simulation.journal.events / took_s,
        decision_us=timed.seconds / timed.count * 1e6,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024,
    )


def day(name: str, setup: Setup, hours: float) -> None:
    """A day of conversations, and the memory after each part of it."""
    simulation = Simulation(policy(name).of(setup))
    seconds, told = hours * 3_600, 0
    began_s = time.perf_counter()

    def arrivals() -> Iterator[Asked]:
        nonlocal told
        for asked in _made_up(seconds, DAY_RATE):
            if asked.at_ns / 1e9 >= told * seconds / SAMPLES:
                told += 1
                print(
                    f"hour {asked.at_ns / 3.6e12:5.1f}: {time.perf_counter() - began_s:6.1f} s, {_resident_mb():,.0f} MB"
                )
            yield asked

    outcome = simulation.run(arrivals())
    took_s = time.perf_counter() - began_s
    served = outcome.ttft.requests
    print(f"{served:,} requests in {took_s:.0f} s of wall clock, {served / took_s:,.0f}/s, {_resident_mb():,.0f} MB")
    print(conditions())
    print(f"TTFT mean {outcome.ttft.mean_s:.3f} s, P90 {outcome.ttft.p90_s:.3f} s, hit rate {outcome.hit_rate:.1%}")


def _made_up(seconds: float, rate: float) -> Iterator[Asked]:
    return requests_of(generated([Phase(seconds, rate, SHAPES["conversation"])], Random(1)), 512)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
