"""`vertumnus plan`: the composition to begin with, for what a trace asks for."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.commands.profile import DEFAULT_DEGREES, Degrees
from cli.commands.trace import File, Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.controller.planning import Candidate, Load
    from services.controller.searching import Tried

SHOWN = 6


def plan(
    file: File,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="equal nodes")] = 1,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="GPUs of each node")] = 8,
    degrees: Degrees = DEFAULT_DEGREES,
    coefficients: Annotated[
        str, typer.Option(help="cost model and κ_C: a set's name, or a .json")
    ] = "qwen3_30b_a3b_h20",
    by: Annotated[
        Literal["replay", "paper"],
        typer.Option(help="what decides: the mean TTFT of a replay, or the paper's rule of one window and one length"),
    ] = "replay",
    hit_rate: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.99, help="share of each prompt expected in caches [a replay: what repeats; the rule: 0]"
        ),
    ] = None,
    rank_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of KV that one GPU holds beside the weights [enough]")
    ] = None,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="what a step computes of one prompt, and each worker has to hold")
    ] = 32_768,
    window_s: Annotated[int, typer.Option(min=1, max=3_600, help="H, as the pool's parameter")] = 20,
    capacity_share: Annotated[float, typer.Option(min=0.01, max=1, help="κ_C / H of degrees without a profile")] = 0.7,
    up: Annotated[
        float, typer.Option(min=0.01, max=10, help="share of the capacity to be used, as the parameter")
    ] = 0.75,
    as_json: Json = False,
) -> None:
    """Weigh compositions of equal nodes against a trace, and say why one is to be begun with."""
    import orjson

    from cli.profiling.asking import numbers
    from cli.simulating.planning import repeated
    from cli.terminal import output, reason
    from services.controller.capacity import capacity
    from services.controller.forecast import rule
    from services.controller.planning import Hardware
    from services.controller.planning import load as load_of
    from services.controller.planning import plan as weigh
    from services.controller.searching import replay, search
    from shared.model.capacity import load_capacities
    from shared.model.cost import load_coefficients
    from shared.model.parameters import RECOMMENDED, Parameters
    from simulation.workloads.files import read

    try:
        model, profiled = load_coefficients(coefficients), load_capacities(coefficients)
        rows = list(read(file))
        load = load_of([(each.arrival_ms, each.prompt_tokens) for each in rows], model, window_s)
        of = {
            each: capacity(profiled, capacity_share, window_s * 10**6, each).us
            for each in numbers("--degrees", degrees, int)
        }
        share = hit_rate or 0.0
        found = weigh(
            load,
            Hardware(nodes, ranks, of, rank_tokens, step_tokens),
            lambda degree, tokens: model.prefill_us(degree, tokens - int(share * tokens), int(share * tokens)),
            up,
        )
        live = rule(Parameters(**RECOMMENDED))
        tried = search(found, replay(repeated(rows, hit_rate), model, live)) if by == "replay" else []
    except (ValueError, OSError) as error:
        typer.echo(f"plan: {reason(error)}", err=True)
        raise typer.Exit(2) from error
    shown = [(each, f"{ttft_us / 1e6:.3f}") for each, ttft_us in tried] or [(each, "") for each in found]
    best = shown[0][0]
    compositions = {f"n{number}": ",".join(map(str, each)) for number, each in enumerate(best.nodes)}
    if as_json:
        document = {"compositions": compositions, **best._asdict(), "ttft_us": tried[0].ttft_us if tried else None}
        print(orjson.dumps(document).decode())
        return
    console = output()
    console.print(_table(shown[:SHOWN], load))
    why = _why_replayed(tried, found[0]) if tried else _why(best, found)
    console.print(f"{why}; by {model.version}\nVERTUMNUS_COMPOSITIONS='{orjson.dumps(compositions).decode()}'")


def _table(shown: "Sequence[tuple[Candidate, str]]", load: "Load") -> object:
    from rich.table import Table

    busiest = f"{len(load.busiest)} prompts in the busiest window"
    title = f"P90 {load.p90_tokens:,} tokens, τ {load.slo_us / 1e6:.2f} s; {busiest}"
    table = Table(
        "workers", "mean TTFT, s", "P90 served in, s", "within τ", "demand, s", "capacity, s", "enough", title=title
    )
    for each, ttft_s in shown:
        table.add_row(
            _workers(each),
            ttft_s,
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


def _why_replayed(tried: "Sequence[Tried]", paper: "Candidate") -> str:
    best = tried[0]
    said = (
        f"{_workers(best.candidate)}: the least mean TTFT of {len(tried)} compositions that the trace was replayed on"
    )
    if best.candidate == paper:
        return f"{said}; the paper's rule takes the same"
    more = next(each.ttft_us for each in tried if each.candidate == paper) / best.ttft_us - 1
    return f"{said}; the paper's rule takes {_workers(paper)}, {more:+.0%}"
