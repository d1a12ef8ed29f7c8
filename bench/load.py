"""How much load a running system carries: TTFT and SLO attainment at one rate after another, until it is too much.

    python -m bench.load --url http://127.0.0.1:8000 --rates 1,2,4,8 --seconds 60 --slo-ms 2000

Every step sends a made-up trace of the same shape with the step's rate and seed (`simulation.workloads.generating`), open
loop, and waits until all is answered. The steps end with the first that attains less than half. The carried rate is the highest
that attains at least `CARRIED` of its tokens.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import uvloop
from rich.console import Console
from rich.table import Table

from cli.trace.measuring import LinearObjective, Report
from cli.trace.sending import NoServer, Target, first_model, send
from shared.runtime.clock import SystemClock
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.rows import Row
from simulation.workloads.shaping import capped, shrunk

CARRIED = 0.9
TOO_MUCH = 0.5


class Step(NamedTuple):
    """One rate, and what became of it."""

    requests_per_s: float
    report: Report

    @property
    def attainment(self) -> float:
        """By tokens."""
        assert self.report.attainment_by_tokens is not None, "every step has an objective"
        return self.report.attainment_by_tokens


def trace(arguments: argparse.Namespace, requests_per_s: float) -> Iterator[Row]:
    phase = Phase(arguments.seconds, requests_per_s, SHAPES[arguments.shape])
    rows = shrunk(generated([phase], Random(arguments.seed)), arguments.shrink)
    return capped(rows, arguments.max_prompt, arguments.max_output)


async def measured(arguments: argparse.Namespace, console: Console) -> list[Step]:
    objective = LinearObjective(arguments.slo_ms / 1000, arguments.slo_ms_per_1k / 1000)
    target = Target(arguments.url, await first_model(arguments.url), objective=objective)
    steps: list[Step] = []
    for requests_per_s in arguments.rates:
        console.print(f"{requests_per_s:g} requests/s for {arguments.seconds:g} s")
        steps.append(Step(requests_per_s, await send(trace(arguments, requests_per_s), target, SystemClock())))
        if steps[-1].attainment < TOO_MUCH:
            break
    return steps


def table(steps: list[Step]) -> Table:
    found = Table("rate/s", "sent", "failed", "refused", "TTFT mean", "P50", "P90", "P99", "in SLO", "cached", box=None)
    for requests_per_s, report in steps:
        ttft = report.ttft_s
        times = ("-",) * 4 if ttft is None else [f"{value:.3f}" for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)]
        counts = (f"{requests_per_s:g}", str(report.requests), str(report.failed), str(report.refused))
        found.add_row(*counts, *times, f"{report.attainment_by_tokens:.1%}", f"{report.cached_share:.1%}")
    return found


def carried(steps: list[Step]) -> float | None:
    """The highest rate up to which every step attained enough; None when not even the first did."""
    found = None
    for step in steps:
        if step.attainment < CARRIED:
            return found
        found = step.requests_per_s
    return found


def rates(text: str) -> list[float]:
    """Errors: ValueError."""
    found = [float(part) for part in text.split(",")]
    if not found or any(rate <= 0 for rate in found) or found != sorted(found):
        raise ValueError(text)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rates", type=rates, default="1,2,4,8,16,32", help="requests per second, rising")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--shape", choices=SHAPES, default="conversation")
    parser.add_argument("--shrink", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--max-prompt", type=int, default=100_000)
    parser.add_argument("--max-output", type=int, default=1)
    parser.add_argument("--slo-ms", type=float, default=2000, help="TTFT objective of an empty prompt")
    parser.add_argument("--slo-ms-per-1k", type=float, default=250, help="and for each thousand tokens of prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    return parser.parse_args()


def main() -> None:
    arguments, console = parsed(), Console()
    try:
        steps = uvloop.run(measured(arguments, console))
    except NoServer as error:
        sys.exit(f"bench.load: {error}")
    console.print(table(steps))
    console.print(
        f"carried: {carried(steps) or 'not even the first'} requests/s at {CARRIED:.0%} of tokens within the SLO"
    )
    if arguments.out is not None:
        document = [
            {"requests_per_s": step.requests_per_s, "attainment": step.attainment} | figures(step) for step in steps
        ]
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def figures(step: Step) -> dict[str, object]:
    ttft = step.report.ttft_s
    counts = {name: getattr(step.report, name) for name in ("requests", "ok", "refused", "failed", "cached_share")}
    return counts | {"ttft_s": None if ttft is None else ttft._asdict()}


if __name__ == "__main__":
    main()
