"""`vertumnus calibrate-cache`: what the cache manager's thresholds should be, by a window of real arrivals."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from cli.commands import trace as trace_command
from cli.commands.events import run
from cli.commands.operate import By, Reason, ask
from cli.commands.simulate import DEFAULT_NODES, Coefficients, Gpus, Nodes, Seeds, Sets
from cli.commands.trace import BlockTokens, Json, Rate
from cli.commands.verify import From, To

if TYPE_CHECKING:
    from simulation.policies.calibrating import Tried
    from simulation.policies.routers import Asked
    from simulation.policies.setup import Setup

REQUESTS = 20_000


class _Window(NamedTuple):
    """What is tried on, and what it was."""

    setup: "Setup"
    requests: "tuple[Asked, ...]"
    warmup_s: float
    title: str


def calibrate_cache(
    file: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="a trace instead of the record")
    ] = None,
    first: From = None,
    last: To = None,
    node: Nodes = DEFAULT_NODES,
    gpus: Gpus = None,
    rate: Rate = None,
    block_tokens: BlockTokens = 512,
    coefficients: Coefficients = "qwen3_30b_a3b_h20",
    set_: Sets = [],  # noqa: B006 - typer copies it
    limit: Annotated[int, typer.Option(min=1, help="requests at most, the first ones")] = REQUESTS,
    seeds: Seeds = 2,
    apply: Annotated[bool, typer.Option("--apply", help="set what is chosen in the running pool")] = False,
    reason: Reason = "",
    by: By = None,
    json: Json = False,
) -> None:
    """Try thresholds of `cache_policy` on a recorded window, or on a trace, and say which are worth setting and why.

    Values come from the window itself: from what prefixes are asked for, what is lost for want of them, how long they stay
    wanted and what a block takes to copy. Each is tried on the window's arrivals in virtual time, with the pool, the
    parameters and the coefficients that it was recorded with; for a trace --node and --set say them. A bundle is a record
    once `vertumnus ledger import` has read it.
    """
    from cli.terminal import output
    from simulation.policies.calibrating import calibrate

    with trace_command.refusals():
        window = (
            _recorded(first, last, set_, limit)
            if file is None
            else _traced(file, node, gpus, rate, block_tokens, coefficients, set_, limit)
        )
        found = calibrate(window.setup, window.requests, window.warmup_s, range(1, seeds + 1), _progress)
    changes = dict(found.chosen.trial.parameters) if found.chosen else {}
    if json:
        trace_command.print_json(
            {"window": window.title, "tried": [_row(each) for each in found.tried], "set": changes}
        )
    else:
        output().print(_picture(window, found.tried))
        output().print(f"vertumnus params set {_as_typed(changes)}" if changes else "nothing is worth a change")
    if apply and changes:
        ask("parameters", reason or f"calibrate-cache: {window.title}", by, changes=changes)


def _recorded(first: str | None, last: str | None, set_: list[str], limit: int) -> _Window:
    """Errors: those of `recorded_run`, ValueError."""
    from dataclasses import replace

    from cli.events.printing import progress
    from cli.record.instants import span
    from cli.simulating import asking
    from cli.whereabouts import database_url
    from simulation.policies.recorded import recorded_run

    asked, url = span(first, last), database_url()
    with progress("events read") as told:
        found = run(lambda: recorded_run(url, asked, told))
    setup = replace(found.setup, parameters={**found.setup.parameters, **asking.parse_parameters(set_)})
    requests = found.requests[:limit]
    return _Window(setup, requests, found.warmup_s, f"{len(requests):,} recorded requests on {setup.gpus} GPUs")


def _traced(
    file: Path, node: list[str], gpus: int | None, rate: float | None, block_tokens: int, coefficients: str,
    set_: list[str], limit: int,
) -> _Window:  # fmt: skip
    """Errors: ValueError, OSError."""
    from cli.simulating import asking
    from shared.model.cost import load_coefficients
    from simulation.policies.arrivals import requests_of
    from simulation.policies.setup import Setup
    from simulation.workloads.files import read

    setup = Setup(
        compositions=asking.parse_nodes(node, gpus),
        coefficients=load_coefficients(coefficients),
        parameters=asking.parse_parameters(set_),
        block_tokens=block_tokens,
    )
    shaping = trace_command.Shaping(0, float("inf"), limit, None, rate, None, 1, 1 << 22, 1 << 20, 1)
    _, rows = shaping.apply(lambda: read(file, block_tokens))
    requests = tuple(requests_of(rows, block_tokens))
    return _Window(setup, requests, 0.0, f"{len(requests):,} requests of {file.name} on {setup.gpus} GPUs")


def _progress(tried: "Tried") -> None:
    trace_command.errors.print(f"{tried.trial.name}: {tried.change.mean:+.1%}")


def _row(tried: "Tried") -> dict[str, Any]:
    from simulation.policies.studies import figures

    return {**tried.trial._asdict(), "change": tried.change._asdict(), "figures": figures(tried.outcomes)}


def _picture(window: _Window, tried: "list[Tried]") -> Any:
    from rich.table import Table

    from simulation.policies.studies import figures

    shown = Table("", "mean, s", "P90, s", "hit rate", "mean, change", "why", title=window.title, title_justify="left")
    for each in tried:
        found = figures(each.outcomes)
        change = f"{each.change.mean:+.1%} ±{100 * each.change.sd:.1f}"
        shown.add_row(
            each.trial.name, f"{found['mean_s'].mean:.3f}", f"{found['p90_s'].mean:.3f}", f"{found['hit_rate'].mean:.1%}",
            change, each.trial.why,
        )  # fmt: skip
    return shown


def _as_typed(changes: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in changes.items())
