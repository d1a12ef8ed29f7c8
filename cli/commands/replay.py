"""`vertumnus replay`: the whole state as of an instant."""

from typing import Annotated, Any

import typer

from cli.commands.events import EXIT_FAILED, Json, run


def replay(
    at: Annotated[str | None, typer.Option("--at", metavar="SEQ|TIME", help="the instant")] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option("--diff", metavar="A B", help="what differs between two instants")
    ] = None,
    json: Json = False,
) -> None:
    """Nodes, workers, caches, parameters and open requests as of a sequence of the newest log, or a time (ISO 8601, UTC).

    They are folded from the last snapshot before. Exit status 1 if the record does not cover the instant.
    """
    from cli.events.printing import progress
    from cli.record.instants import instant
    from cli.whereabouts import database_url
    from replay.instants import Nothing, states

    if (at is None) == (diff is None):
        raise typer.BadParameter("give either --at INSTANT or --diff A B")
    try:
        asked = [instant("--at", at)] if at is not None else [instant("--diff", each) for each in diff or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    url = database_url()
    try:
        with progress("events folded") as told:
            found = run(lambda: states(url, asked, told))
    except Nothing as nothing:
        typer.echo(str(nothing), err=True)
        raise typer.Exit(EXIT_FAILED) from nothing
    if diff is None:
        _print_state(found[0], json)
    else:
        _print_difference(found[0], found[1], json)


def _print_state(state: dict[str, Any], json: bool) -> None:
    import orjson

    from cli.commands.status import tables
    from cli.terminal import output

    if json:
        print(orjson.dumps(state).decode())
        return
    console = output()
    place, begun = state["place"], state["folded_from"]
    start = f"the snapshot at {begun['log']}:{begun['stream_seq']}" if begun else "the record's beginning"
    console.print(f"as of {place['log']}:{place['stream_seq']}, folded from {start}", markup=False, soft_wrap=True)
    for table in tables({}, {name: list(state[name].values()) for name in ("nodes", "workers")}):
        console.print(table)
    parameters = " ".join(f"{name}={value}" for name, value in state["parameters"].items())
    console.print(f"parameters: {parameters}", markup=False, soft_wrap=True)
    console.print(f"{state['open_requests']:,} open requests; {state['blocks']:,} different blocks are cached")
    if not state["caches_known"]:
        console.print(
            "Block events between there and the instant were dropped by policy: what workers held is not known.",
            soft_wrap=True,
        )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_difference(one: dict[str, Any], other: dict[str, Any], json: bool) -> None:
    import orjson
    from rich.table import Table

    from cli.terminal import output
    from replay.instants import differences

    found = differences(one, other)
    if json:
        print(orjson.dumps([{"field": path, "before": a, "after": b} for path, a, b in found]).decode())
        return
    table = Table("what", "before", "after")
    for column in table.columns:
        # Nothing is cut off: an id without its end is none.
        column.overflow = "fold"
    for path, before, after in found:
        table.add_row(path, *("" if value is None else _cell(value) for value in (before, after)))
    output().print(table)
