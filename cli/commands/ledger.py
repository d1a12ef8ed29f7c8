"""`vertumnus ledger`: look after the permanent record."""

import getpass
from typing import Annotated

import typer

from cli.commands.events import EXIT_FAILED, Json, run

app = typer.Typer(help="Look after the permanent record.", no_args_is_help=True)


@app.command("accept-gap")
def accept_gap(
    reason: Annotated[str, typer.Option(help="kept in the record", prompt="Why may these events be missing")],
    operator: Annotated[str | None, typer.Option("--by", help="who accepts it [default: the user's name]")] = None,
    json: Json = False,
) -> None:
    """Let the ledger go on after events that the stream had dropped before they were recorded.

    They cannot be had any more. Who accepted it and why is a row of the record. Exit status 1 if the ledger waits at no gap.
    """
    import orjson

    from cli.whereabouts import database_url
    from services.ledger import database, logbook

    url = database_url()

    async def accept() -> tuple[object, int, int] | None:
        connection = await database.connect(url)
        try:
            return await logbook.accept_gap(connection, operator or getpass.getuser(), reason)
        finally:
            await connection.close()

    accepted = run(accept)
    if accepted is None:
        typer.echo("the ledger waits at no gap", err=True)
        raise typer.Exit(EXIT_FAILED)
    log, from_seq, to_seq = accepted
    if json:
        typer.echo(orjson.dumps({"log": str(log), "from_seq": from_seq, "to_seq": to_seq}))
    else:
        typer.echo(f"accepted: events {from_seq} to {to_seq} of log {log} are missing")


@app.command()
def rebuild(json: Json = False) -> None:
    """Make every read model anew from the record. The ledger must be stopped. Exit status 1 if it is not."""
    from cli.events.printing import progress
    from cli.whereabouts import database_url
    from services.ledger.rebuild import LedgerActive
    from services.ledger.rebuild import rebuild as rebuild_read_models

    url = database_url()
    try:
        with progress("events folded") as told:
            events = run(lambda: rebuild_read_models(url, told))
    except LedgerActive as active:
        typer.echo(str(active), err=True)
        raise typer.Exit(EXIT_FAILED) from active
    typer.echo(f'{{"events":{events}}}' if json else f"rebuilt from {events:,} events")
