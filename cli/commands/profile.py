"""`vertumnus profile`: how long prefills take on this machine, over degree × length × hit ratio."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.commands.up import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from cli.profiling.document import Profile
    from cli.profiling.measuring import Measured
    from cli.profiling.profiling import Order

EngineName = Annotated[
    Literal["torch", "sglang", "modelled"],
    typer.Option(
        help="`torch` computes; `sglang` drives the servers that VERTUMNUS_SGLANG_SERVERS names; `modelled` takes the time that"
        " its cost model gives, at once"
    ),
]
Model = Annotated[Path | None, typer.Option(file_okay=False, help=f"Model directory [DATA_DIR/models/{DEFAULT_MODEL}]")]
Degrees = Annotated[str, typer.Option(help="Degrees, with commas; the largest is the number of ranks that are started")]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds ask for equal prompts at equal instants")]

DEFAULT_DEGREES = "1,2,4,8"
REPEATS_MAX = 100


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="The profile, as JSON")],
    engine: EngineName = "torch",
    model: Model = None,
    degrees: Degrees = DEFAULT_DEGREES,
    lengths: Annotated[
        str | None, typer.Option(help="Prompt tokens, with commas [doubling from 64 to the model's limit]")
    ] = None,
    hit_ratios: Annotated[str, typer.Option(help="Cached shares of a prompt, cut to whole blocks")] = "0,0.5,0.9",
    repeats: Annotated[int, typer.Option(min=1, max=REPEATS_MAX, help="Prefills of each point; fits use medians")] = 3,
    warmups: Annotated[int, typer.Option(min=0, max=REPEATS_MAX, help="Prefills before these, not counted")] = 1,
    budget_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Begin no length that would end later than this (not modelled)")
    ] = 180,
    seed: Seed = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The profile on standard output as well")] = False,
) -> None:
    """Measure single prefills, one after the other, nothing queued: the input of `vertumnus fit`.

    A point's cached prefix is resident on the worker that is measured, or the command ends with an error.
    """
    from rich.console import Console

    from cli.files import whole
    from cli.profiling.asking import numbers, refusals, worker_settings, write_json
    from cli.profiling.profiling import Order

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with refusals("profile", console):
        chosen = numbers("--degrees", degrees, int)
        order = Order(
            settings=worker_settings(engine, model, chosen),
            degrees=chosen,
            lengths=None if lengths is None else numbers("--lengths", lengths, int),
            hit_ratios=numbers("--hit-ratios", hit_ratios, float),
            warmups=warmups,
            repeats=repeats,
            budget_s=float("inf") if engine == "modelled" else budget_s,
            seed=seed,
        )
        # Opened before anything is measured: a place that cannot be written to is to cost nobody minutes.
        with whole(out) as file:
            found, measured = _with_progress(order, console)
            write_json(found, file)
    if as_json:
        print(found.model_dump_json())
    _say(found, measured, out, console)


def _with_progress(order: "Order", console: "Console") -> "tuple[Profile, Measured]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.profiling.grid import Cell
    from cli.profiling.profiling import profiled

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("starting the engine", total=None)

        def told(cell: Cell, points: int) -> None:
            shape = f"degree {cell.degree}, {cell.uncached_tokens} tokens after {cell.cached_tokens}"
            progress.update(bar, advance=1, total=points, description=shape)

        return profiled(order, told)


def _say(found: "Profile", measured: "Measured", out: Path, console: "Console") -> None:
    from cli.invocation import command

    longest = max(point.prompt_tokens for point in found.points)
    console.print(f"{out}: {len(found.points)} points of {found.model}, prompts of up to {longest:,} tokens")
    if found.device == "modelled":
        console.print(
            "the engine was a cost model: this shows the method and says nothing of a machine", style="yellow"
        )
    if measured.left_out:
        left_out = ", ".join(f"{length:,}" for length in measured.left_out)
        console.print(f"left out, for the budget: {left_out} tokens; --budget-s reaches further")
    console.print(f"next: {command()} fit {out} -o coefficients.json")
