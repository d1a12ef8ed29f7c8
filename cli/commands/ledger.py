"""`vertumnus ledger`: look after the permanent record, and carry it to another database."""

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.events import EXIT_FAILED, Json, run

if TYPE_CHECKING:
    from replay.verifying import Span

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


@app.command("export")
def export_record(
    file: Annotated[Path, typer.Argument(dir_okay=False, help="the file to write")],
    first: Annotated[
        str | None, typer.Option("--from", metavar="SEQ|TIME", help="the first event [default: the record's first]")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", metavar="SEQ|TIME", help="the last one")] = None,
    mooncake: Annotated[
        bool, typer.Option("--mooncake", help="a trace of the recorded arrivals, for `vertumnus trace`")
    ] = False,
    json: Json = False,
) -> None:
    """Write the record into a file that `ledger import` takes in elsewhere; with --mooncake the load alone.

    A record is written from its beginning or, with --from, from the last seal before it, with the state that was kept there. It
    ends where --to says. Both are a sequence of the newest log, or a time (ISO 8601, UTC). Exit status 1 if the record has
    nothing there, no seal before it, or is not whole.
    """
    from cli.record.instants import span

    try:
        asked = span(first, last)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if mooncake:
        _export_trace(file, asked, json)
    else:
        _export_bundle(file, asked, json, is_part=first is not None)


@app.command("import")
def import_record(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="what `ledger export` wrote")
    ],
    json: Json = False,
) -> None:
    """Take a record into the empty database that VERTUMNUS_DATABASE_URL names, which is migrated first. All of it, or nothing.

    Every row's link in its chain is made anew from its bytes and compared; read models are folded on the way. The state at the
    beginning of a part has to be what a seal in the part says. Exit status 1 if the file is no whole bundle, or the database
    has a record already.
    """
    from cli.events.printing import progress
    from cli.whereabouts import database_url
    from migrations.steps import NotMigrated, upgrade
    from replay.keeping import check
    from services.ledger.bundles import BadBundle
    from services.ledger.importing import NotEmpty, import_bundle
    from services.ledger.rebuild import LedgerActive

    url = database_url()
    try:
        upgrade(url)
    except NotMigrated as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from error
    try:
        with file.open("rb") as opened, progress("events imported") as told:
            found = run(lambda: import_bundle(url, opened, told, check))
    except (BadBundle, NotEmpty, LedgerActive) as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    _tell(found._asdict(), f"{found.rows:,} events of {found.logs} log{'s'[: found.logs != 1]} of {found.pool}", json)


def _export_bundle(file: Path, asked: "Span", json: bool, *, is_part: bool) -> None:
    from cli.events.printing import progress
    from cli.files import whole
    from cli.whereabouts import database_url
    from replay.keeping import NoState, beginning
    from services.ledger.exporting import Begins, NotExported, export

    url = database_url()
    begins = None
    try:
        with whole(file) as opened:
            if is_part:
                with progress("events folded") as told:
                    begins = Begins(*run(lambda: beginning(url, asked, told)))
            with progress("events exported") as told:
                found = run(lambda: export(url, opened, asked.to_seq, asked.to_ns, told, begins))
    except (NotExported, NoState, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from error
    behind = f" behind {found.after_seq:,}" if found.after_seq else ""
    _tell(found._asdict(), f"{file}: {found.rows:,} events{behind} up to {found.to_seq:,}", json)


def _export_trace(file: Path, asked: "Span", json: bool) -> None:
    import secrets

    from cli.files import whole
    from cli.record.mooncake import NoTrace, export_trace
    from cli.whereabouts import database_url
    from services.ledger.arrivals import Range

    url = database_url()
    try:
        with whole(file) as opened:
            found = run(lambda: export_trace(url, Range(*asked), secrets.token_bytes(16), opened))
    except (NoTrace, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from error
    size = found.block_tokens
    _tell(found._asdict(), f"{file}: {found.requests:,} requests; read it with --block-tokens {size}", json)


def _tell(found: dict[str, object], text: str, json: bool) -> None:
    import orjson

    typer.echo(orjson.dumps(found) if json else text)
