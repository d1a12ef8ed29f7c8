"""`python -m simulation.faults`: many seeds, or one failure again. Ends with code 1 if any seed fails."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter
from typing import Annotated

import typer

from simulation.faults.running import Parts, Verdict, judge
from simulation.faults.scenario import draw
from simulation.faults.shrinking import shrink

FAILURES_SHOWN_MAX = 5


def main(
    seeds: Annotated[str, typer.Option(help="one seed, or FIRST:LAST with LAST left out")] = "0:200",
    faults: Annotated[str | None, typer.Option(help="only these of a seed's faults, such as 0,3, or none")] = None,
    requests: Annotated[str | None, typer.Option(help="only these of its requests")] = None,
    asks: Annotated[str | None, typer.Option(help="only these of what operators ask for")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="processes")] = 1,
) -> None:
    """Run the services through the scenarios of these seeds. Of each that fails: why, the smallest one, and its command."""
    parts = Parts(_chosen(faults), _chosen(requests), _chosen(asks))
    began_s, failed = perf_counter(), 0
    events, types = 0, Counter[str]()
    chosen = _range(seeds)
    for verdict in _verdicts(chosen, parts, jobs):
        events += verdict.events
        types += verdict.types
        if not verdict.clean:
            failed += 1
            _tell(verdict, parts, small=failed <= FAILURES_SHOWN_MAX)
    took_s = perf_counter() - began_s
    typer.echo(f"{len(chosen)} seeds, {failed} failed, {events:,} events, {len(chosen) / took_s:.1f} seeds/s")
    typer.echo("  " + ", ".join(f"{name} {count}" for name, count in types.most_common()))
    raise typer.Exit(code=1 if failed else 0)


def _verdicts(seeds: range, parts: Parts, jobs: int) -> Iterator[Verdict]:
    scenarios = (parts.of(draw(seed)) for seed in seeds)
    if jobs == 1:
        yield from map(judge, scenarios)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(judge, scenarios, chunksize=8)


def _tell(verdict: Verdict, parts: Parts, *, small: bool) -> None:
    typer.echo(f"seed {verdict.seed}: {verdict.violations[0]}")
    typer.echo(f"  {parts.command(verdict.seed)}")
    if not small:
        return
    scenario = parts.of(draw(verdict.seed))
    smallest = shrink(scenario, lambda each: not judge(each).clean)
    again = smallest.of(scenario)
    typer.echo(f"  smallest: {judge(again).violations[0]}")
    for part in (again.shape, *again.faults, *again.asks, *again.requests):
        typer.echo(f"    {part}")
    if parts == Parts():
        typer.echo(f"  {smallest.command(verdict.seed)}")


def _chosen(numbers: str | None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    return () if numbers == "none" else tuple(int(each) for each in numbers.split(","))


def _range(seeds: str) -> range:
    first, _, last = seeds.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


if __name__ == "__main__":
    typer.run(main)
