"""`vertumnus events`: what happened, from the stream as it happens or from the record."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from services.ledger.audit import Audit

app = typer.Typer(help="Read the event log.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, one object per line")]

LAST_MAX = 1_000_000
HOW_MANY = "how many; of a type, as many as there are among the newest 100,000 of all"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

T = TypeVar("T")


@app.command()
def tail(
    kind: Annotated[list[str] | None, typer.Option("--type", help="only events of this type; may be repeated")] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=0, max=LAST_MAX, help=HOW_MANY)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with new events until Ctrl-C")] = False,
    json: Json = False,
) -> None:
    """Print the newest events, from the stream itself: it works while Postgres is away."""
    from cli.events.printing import json_line, line
    from cli.events.tailing import OF_A_TYPE_MAX, known_kinds
    from cli.events.tailing import tail as tail_stream
    from cli.whereabouts import nats_url

    form: Callable[[int, bytes], str] = json_line if json else line
    try:
        kinds = known_kinds(kind or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--type") from error
    url, lines = nats_url(), 0

    def tell(seq: int, raw: bytes) -> None:
        nonlocal lines
        lines += 1
        print(form(seq, raw), flush=follow)

    run(lambda: tail_stream(url, last, follow, kinds, tell))
    if not lines and kinds and last:
        typer.echo(f"none of the newest {max(last, OF_A_TYPE_MAX):,} events is {' or '.join(sorted(kinds))}", err=True)


@app.command()
def get(
    what: Annotated[str, typer.Argument(help="an event's id, its SEQ or LOG:SEQ, or a request's id")],
    json: Json = False,
) -> None:
    """Print one event, or everything that the record says of a request. Exit status 1 if there is none."""
    from rich.console import Console

    from cli.events.finding import find
    from cli.events.printing import line_of
    from cli.whereabouts import database_url

    url = database_url()
    found = run(lambda: find(url, what))
    if found is None:
        typer.echo(f"{what}: neither an event nor a request of the record", err=True)
        raise typer.Exit(EXIT_FAILED)
    console = Console(soft_wrap=True)
    if json:
        console.out(_json(found), highlight=False)
    elif "events" not in found:
        console.print_json(data=found, default=str)
    else:
        for each in found["events"]:
            console.out(line_of(each), highlight=False)
        console.print_json(data={name: value for name, value in (found["request"] or {}).items() if value is not None})


@app.command()
def audit(
    settled: Annotated[
        bool, typer.Option("--settled", help="nothing is under way: open requests are violations")
    ] = False,
    json: Json = False,
) -> None:
    """Examine the whole record: nothing missing, nothing twice, nothing changed. Exit status 1 on a violation."""
    from cli.whereabouts import database_url

    examine(database_url(), settled=settled, json=json)


def examine(url: str, *, settled: bool, json: bool) -> None:
    """Print the audit of a record. It ends the command if there is a violation."""
    from cli.events.printing import progress
    from services.ledger.audit import audit as audit_record

    with progress("events examined") as told:
        found = run(lambda: audit_record(url, settled=settled, progress=told))
    if json:
        typer.echo(_json(found))
    else:
        _print_audit(found)
    if not found.clean:
        raise typer.Exit(EXIT_FAILED)


def run(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `ask` returns. A server that is away or refuses, or a state of another version, ends the command with one line."""
    from services.ledger.database import AWAY, SchemaMissing
    from shared.runtime.ports import LogLost, Unavailable
    from shared.runtime.server_checks import ServerUnfit
    from shared.runtime.states import BadState

    try:
        return asyncio.run(ask())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): no server's failure, and typer ends the command silently.
        raise
    except (*AWAY, SchemaMissing, LogLost, Unavailable, ServerUnfit, BadState) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def _print_audit(found: "Audit") -> None:
    from rich.table import Table

    from cli.terminal import output

    console = output()
    table = Table("what", "how many")
    rows = {"events": found.events, "logs": found.logs, "in accepted gaps": found.accepted_gap_events}
    rows |= {"seals compared": found.seals, "dropped by policy": found.dropped_rows}
    rows |= {f"in {name}": number for name, number in sorted(found.by_table.items())}
    rows |= {"requests": found.requests, "open requests": len(found.open_requests)}
    rows |= {f"ended by {name}": number for name, number in sorted(found.by_end.items())}
    for name, number in rows.items():
        table.add_row(name, f"{number:,}")
    console.print(table)
    for violation in found.violations:
        console.print(violation, style="red", markup=False, soft_wrap=True)
    console.print(
        "clean" if found.clean else f"{found.violation_count:,} violations", style="green" if found.clean else "red"
    )


def _json(value: Any) -> str:
    import orjson

    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
