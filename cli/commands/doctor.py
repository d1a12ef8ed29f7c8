"""`vertumnus doctor`: whether this machine and the servers it is pointed at can run Vertumnus."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.up import DEFAULT_MODEL

if TYPE_CHECKING:
    from cli.checks import Check

EXIT_UNFIT = 1


def doctor(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where a system on this machine is kept [VERTUMNUS_DATA_DIR, else .vertumnus]")
    ] = None,
    model: Annotated[Path | None, typer.Option(help=f"Model directory [DATA_DIR/models/{DEFAULT_MODEL}]")] = None,
    sglang: Annotated[
        bool, typer.Option("--sglang", help="Look at the servers that VERTUMNUS_SGLANG_SERVERS and _DECODE name, too")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as a JSON array")] = False,
) -> None:
    """Check Python, disk, clock, model, NATS and Postgres; exit with 1 if anything is unfit.

    The servers looked at are those named by VERTUMNUS_NATS_URL and VERTUMNUS_DATABASE_URL, else those of the system that
    runs in the data directory, else embedded ones that are started for the purpose.
    """
    import json
    from dataclasses import asdict

    from cli.checks import examine
    from cli.embedded.data_dir import DataDir
    from cli.settings import CommandSettings

    settings = CommandSettings()
    home = DataDir(data_dir or settings.data_dir)
    checks = examine(settings, home, model or home.models / DEFAULT_MODEL)
    if sglang:
        from cli.sglang_checks import sglang_checks

        checks += sglang_checks(model)
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        show(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(EXIT_UNFIT)


def show(checks: Sequence["Check"]) -> None:
    """The findings as a table, and what is needed where something is unfit."""
    from rich.table import Table
    from rich.text import Text

    from cli.terminal import output

    table = Table("", "what")
    # Nothing is cut off: an error's last words are the ones that help.
    table.add_column("found", overflow="fold")
    table.add_column("needed", overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("unfit", "bold red")
        # As Text: a path in square brackets is no markup.
        table.add_row(mark, Text(check.name), Text(check.found), Text(check.needed))
    output().print(table)
