"""`vertumnus capacity`: how much demand a worker of each degree carries within its SLO, κ_C."""

from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.profile import DEFAULT_DEGREES, Degrees, EngineName, Model, Seed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cli.profiling.capacity import CapacityEvidence, Order
    from simulation.workloads.rows import Row

WINDOWS = {"torch": 3, "sglang": 3, "modelled": 20}
"""Real time is dear; virtual time is not, and chance has less say in more requests."""


def capacity(
    coefficients: Annotated[str, typer.Argument(help="The set in whose seconds demand is counted: a name, or a .json")],
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="The set with its capacities, as JSON")],
    engine: EngineName = "torch",
    model: Model = None,
    degrees: Degrees = DEFAULT_DEGREES,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Lengths and hits are its [made up]")
    ] = None,
    shape: Annotated[str, typer.Option(help="What a made-up trace is like: conversation, tool-agent")] = "tool-agent",
    shrink: Annotated[float, typer.Option(min=0, max=1, help="This factor on all lengths of the trace")] = 1.0,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="Share of prompt tokens within their SLO")] = 0.9,
    window_s: Annotated[float, typer.Option(min=1, max=3_600, help="H, as the pool's parameter")] = 20,
    windows: Annotated[
        int | None, typer.Option(min=1, max=1_000, help="Of predicted service in each trial [3; modelled: 20]")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=12, help="Trials of each degree; each halves the range, from 2 H")
    ] = 6,
    seed: Seed = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The set on standard output, nothing else")] = False,
) -> None:
    """Load one worker of each degree ever more closely around what it can carry; write κ_C beside the coefficients.

    On the torch engine this takes real time: some windows for each trial, less for those that fail early.
    """
    from rich.console import Console

    from cli.files import whole
    from cli.profiling.asking import numbers, refusals, worker_settings, write_json
    from cli.profiling.capacity import Order
    from cli.profiling.ramp import Goal
    from cli.profiling.sets import load_set, with_capacities

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with refusals("capacity", errors):
        chosen, known = numbers("--degrees", degrees, int), load_set(coefficients)
        order = Order(
            settings=worker_settings(engine, model, chosen, coefficients=coefficients),
            degrees=chosen,
            rows=_rows(trace, shape, shrink, seed),
            source=f"{trace.name if trace else shape} x {shrink:g}",
            goal=Goal(known.coefficients, attainment, steps),
            window_s=window_s,
            windows=windows or WINDOWS[engine],
            seed=seed,
        )
        # Opened before anything is measured: a place that cannot be written to is to cost nobody minutes.
        with whole(out) as file:
            found = _with_progress(order, errors)
            profiled = with_capacities(known, {each.degree: each.share for each in found.ramps}, found)
            write_json(profiled, file)
    if as_json:
        print(profiled.model_dump_json())
        return
    Console().print(_table(found))
    if found.device == "modelled":
        errors.print("the engine was a cost model: this shows the method and says nothing of a machine", style="yellow")
    errors.print(f"{out}: {profiled.version}; the controller counts with it where VERTUMNUS_COEFFICIENTS names it")


def _rows(trace: Path | None, shape: str, shrink: float, seed: int) -> "list[Row]":
    """Errors: ValueError names the option; BadRow; OSError."""
    from cli.profiling.load import ROWS_MAX
    from simulation.workloads.files import read
    from simulation.workloads.generating import SHAPES, Phase, generated
    from simulation.workloads.shaping import shrunk

    if shape not in SHAPES:
        raise ValueError(f"--shape {shape}: must be one of {', '.join(SHAPES)}")
    source = generated([Phase(86_400, 3.4, SHAPES[shape])], Random(seed)) if trace is None else read(trace)
    return list(shrunk(islice(source, ROWS_MAX), shrink))


def _with_progress(order: "Order", console: "Console") -> "CapacityEvidence":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.profiling.capacity import measured
    from cli.profiling.ramp import Trial

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("starting the engine", total=len(order.degrees) * order.goal.steps)

        def told(degree: int, trial: Trial) -> None:
            outcome = "carried" if trial.carried else "too much"
            progress.update(bar, advance=1, description=f"degree {degree}: {trial.share:.3f} of a window, {outcome}")

        return measured(order, told)


def _table(found: "CapacityEvidence") -> "Table":
    from rich.table import Table

    title = f"κ_C for {found.attainment:.0%} of tokens within the SLO, H = {found.window_s:g} s, {found.trace}"
    table = Table("degree", "κ_C / H", "κ_C, s", "requests/s", "next that failed", title=title, title_justify="left")
    for each in found.ramps:
        carried = max((trial for trial in each.trials if trial.carried), default=None, key=lambda trial: trial.share)
        failed = min((trial.share for trial in each.trials if not trial.carried), default=None)
        table.add_row(
            str(each.degree),
            f"{each.share:.3f}",
            f"{each.share * found.window_s:.2f}",
            f"{carried.requests_per_s:.2f}" if carried else "none",
            f"{failed:.3f}" if failed is not None else "none",
        )
    return table
