"""`vertumnus verify`: does every recorded decision come out again?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.events import EXIT_FAILED, Json, examine, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from replay.verification import Verification

From = Annotated[str | None, typer.Option("--from", metavar="SEQ|TIME", help="the first decision to compare")]
To = Annotated[str | None, typer.Option("--to", metavar="SEQ|TIME", help="the last one")]


def verify(
    first: From = None,
    last: To = None,
    deep: Annotated[bool, typer.Option("--deep", help="let every folded state examine itself at each window")] = False,
    chain: Annotated[
        bool, typer.Option("--chain", help="examine the record's rows, chains and seals first, like `events audit`")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=64, help="processes [default: up to 3, as the record is worth]")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="keep the state at the last seal: the next --from, explain and export begin there"),
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="only what came since a state was kept last: with --keep, for every hour")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="write what was found for Prometheus' node exporter (NAME.prom)"),
    ] = None,
    json: Json = False,
) -> None:
    """Decide again, with the services' own code, on the states that the record gives, and compare.

    The range is given by sequences of the newest log, or by times (ISO 8601, UTC); what lies before it is folded all the same,
    from the beginning or from a state that was kept before.
    Exit status 1 if a decision differs, or, but with --new, if there was none to check; with --chain also if the record is not
    whole, and then nothing is decided on it.
    """
    from cli.events.printing import progress
    from cli.record.instants import span
    from cli.whereabouts import database_url
    from replay.verification import verify as verify_record

    try:
        asked = span(first, last)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if new and (first or last):
        raise typer.BadParameter("--new is a range of its own: give it, or --from and --to")
    if keep and last:
        raise typer.BadParameter("--keep is up to the newest seal: what lies behind --to would never be verified")
    url = database_url()
    if chain:
        examine(url, settled=False, json=json)
    with progress("events folded") as told:
        found = _verified(
            lambda: run(lambda: verify_record(url, asked, deep=deep, jobs=jobs, keep=keep, new=new, progress=told))
        )
    if json:
        import orjson

        print(orjson.dumps(_document(found)).decode())
    else:
        _print(found)
    if metrics is not None:
        _write_metrics(metrics, found)
    if not (found.clean or (new and found.findings.clean)):
        raise typer.Exit(EXIT_FAILED)


def _verified(verify: "Callable[[], Verification]") -> "Verification":
    from concurrent.futures.process import BrokenProcessPool

    try:
        return verify()
    except BrokenProcessPool as error:
        typer.echo("a process of the verification was killed: for want of memory? --jobs 1 needs the least", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def _write_metrics(file: Path, found: "Verification") -> None:
    from cli.record import verify_metrics
    from shared.runtime.clock import SystemClock

    try:
        verify_metrics.write(file, found, SystemClock().now_ns())
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_FAILED) from error


def _document(found: "Verification") -> dict[str, object]:
    findings = found.findings
    return {
        "logs": found.logs,
        "events": found.events,
        "reached_seq": found.reached_seq,
        "begun_seq": found.begun_seq,
        "kept_seq": found.kept.stream_seq if found.kept else None,
        "checked": dict(findings.checked),
        "differing": dict(findings.differing),
        "skipped": [{"type": kind, "reason": why, "count": n} for (kind, why), n in findings.skipped.items()],
        "differences": [each._asdict() for each in findings.differences],
    }


def _print(found: "Verification") -> None:
    from rich.table import Table

    from cli.terminal import output

    console, findings = output(), found.findings
    table = Table("decision", "checked", "differ", "not derivable")
    for column in table.columns[1:]:
        column.justify = "right"
    skipped: dict[str, int] = {}
    for (kind, _), number in findings.skipped.items():
        skipped[kind] = skipped.get(kind, 0) + number
    for kind in sorted({*findings.checked, *skipped}):
        counts = (findings.checked[kind], findings.differing[kind], skipped.get(kind, 0))
        table.add_row(kind, *(f"{number:,}" for number in counts), style="red" if findings.differing[kind] else None)
    console.print(table)
    for (kind, why), number in sorted(findings.skipped.items()):
        console.print(f"{number:,} {kind} not derivable: {why}", style="yellow", markup=False)
    for difference in findings.differences:
        console.print(str(difference), style="red", markup=False, soft_wrap=True)
    total = findings.checked.total()
    folded = f"{found.events:,} events of {found.logs} log{'s'[: found.logs != 1]} folded"
    if found.begun_seq:
        folded += f" from the state at {found.begun_seq:,} on"
    if found.kept is not None:
        console.print(f"kept the state at {found.kept.stream_seq:,}")
    if not total:
        console.print(f"{folded}; there was no decision to check", style="red")
    elif findings.clean:
        console.print(f"{folded}; all {total:,} decisions come out again", style="green")
    else:
        console.print(
            f"{folded}; {findings.differing.total():,} of {total:,} decisions come out otherwise", style="red"
        )
