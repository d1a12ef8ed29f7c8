"""`vertumnus plan`: the composition to begin with, for what a trace asks for."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.profile import DEFAULT_DEGREES, Degrees
from cli.commands.trace import File, Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.controller.planning import Candidate, Load

SHOWN = 6


def plan(
    file: File,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="equal nodes")] = 1,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="GPUs of each node")] = 8,
    degrees: Degrees = DEFAULT_DEGREES,
    coefficients: Annotated[
        str, typer.Option(help="cost model and κ_C: a set's name, or a .json")
    ] = "qwen3_30b_a3b_h20",
    hit_rate: Annotated[float, typer.Option(min=0, max=0.99, help="share of each prompt expected in caches")] = 0.0,
    window_s: Annotated[int, typer.Option(min=1, max=3_600, help="H, as the pool's parameter")] = 20,
    capacity_share: Annotated[float, typer.Option(min=0.01, max=1, help="κ_C / H of degrees without a profile")] = 0.7,
    up: Annotated[
        float, typer.Option(min=0.01, max=10, help="share of the capacity to be used, as the parameter")
    ] = 0.75,
    as_json: Json = False,
) -> None:
    """Weigh every composition of equal nodes against the trace's busiest window and its P90 length, and say why."""
    import orjson

    from cli.profiling.asking import numbers
    from cli.terminal import output, reason
    from services.controller.capacity import capacity
    from services.controller.planning import Hardware
    from services.controller.planning import load as load_of
    from services.controller.planning import plan as weigh
    from shared.model.capacity import load_capacities
    from shared.model.cost import load_coefficients
    from simulation.workloads.files import read

    try:
        model, profiled = load_coefficients(coefficients), load_capacities(coefficients)
        asked = [(each.arrival_ms, each.prompt_tokens) for each in read(file)]
        load = load_of(asked, model, window_s)
        of = {
            each: capacity(profiled, capacity_share, window_s * 10**6, each).us
            for each in numbers("--degrees", degrees, int)
        }
        found = weigh(
            load,
            Hardware(nodes, ranks, of),
            lambda degree, tokens: model.prefill_us(degree, tokens - int(hit_rate * tokens), int(hit_rate * tokens)),
            up,
        )
    except (ValueError, OSError) as error:
        typer.echo(f"plan: {reason(error)}", err=True)
        raise typer.Exit(2) from error
    best = found[0]
    compositions = {f"n{number}": ",".join(map(str, each)) for number, each in enumerate(best.nodes)}
    if as_json:
        print(orjson.dumps({"compositions": compositions, **best._asdict()}).decode())
        return
    console = output()
    console.print(_table(found[:SHOWN], load))
    console.print(
        f"{_why(best, found)}; by {model.version}\nVERTUMNUS_COMPOSITIONS='{orjson.dumps(compositions).decode()}'"
    )


def _table(found: "Sequence[Candidate]", load: "Load") -> object:
    from rich.table import Table

    busiest = f"{len(load.busiest)} prompts in the busiest window"
    title = f"P90 {load.p90_tokens:,} tokens, τ {load.slo_us / 1e6:.2f} s; {busiest}"
    table = Table("workers", "P90 served in, s", "within τ", "demand, s", "capacity, s", "enough", title=title)
    for each in found:
        table.add_row(
            _workers(each),
            f"{each.p90_us / 1e6:.2f}",
            "yes" if each.suitable else "no",
            f"{each.demand_us / 1e6:.1f}",
            f"{each.capacity_us / 1e6:.1f}",
            "yes" if each.enough else "no",
        )
    return table


def _workers(each: "Candidate") -> str:
    return " ".join(f"{number}CP{degree}" for degree, number in Counter(each.degrees).items())


def _why(best: "Candidate", found: "Sequence[Candidate]") -> str:
    fit = sum(each.suitable and each.enough for each in found)
    if best.suitable and best.enough:
        return f"{_workers(best)}: most workers of large degrees of the {fit} of {len(found)} that carry this within τ"
    if best.suitable:
        return f"{_workers(best)}: none carries the busiest window; this has the largest capacity of those within the objective"
    return f"{_workers(best)}: no degree serves the P90 length within its objective; this has the largest capacity"
