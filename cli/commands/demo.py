"""`vertumnus demo`: what the system does, in a few minutes, on this machine."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cli.demo.comparing import Shifting
    from cli.demo.table import Figures

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def demo(
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A trace in Mooncake's format [made up]")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept [VERTUMNUS_DATA_DIR, else .vertumnus]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON on standard output")] = False,
) -> None:
    """Serve a small real model, split and merged on the way; serve forty modelled GPUs; compare compositions that stay with one
    that adapts; and show what came of it.

    Exit status: 0 when every request was answered or refused by admission (429, 503), every token is the reference's and the
    record is whole; 1 when not; 130 after Ctrl-C.
    """
    from rich.console import Console

    from cli.demo.comparing import compare
    from cli.demo.running import DemoFailed
    from cli.demo.table import passed
    from cli.embedded.data_dir import AlreadyRunning
    from cli.embedded.moving import NotMoved
    from cli.embedded.processes import StartFailed
    from cli.embedded.supervisor import GaveUp, Interrupted
    from cli.trace.sending import NoServer

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        told = _both_halves(trace, data_dir, console)
        console.rule("3. in virtual time: compositions that stay, and one that adapts")
        shifting = compare(console)
    except (Interrupted, KeyboardInterrupt):
        console.print("stopped before the end: no table")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (DemoFailed, AlreadyRunning, StartFailed, GaveUp, NoServer, NotMoved, ValueError, OSError) as failure:
        console.print(f"vertumnus demo: {failure}", style="red", markup=False)
        raise typer.Exit(EXIT_FAILED) from failure
    _show(told, shifting, console, as_json=as_json)
    if not all(passed(each) for each in told.values()):
        raise typer.Exit(EXIT_FAILED)


def _both_halves(trace: Path | None, data_dir: Path | None, console: "Console") -> "dict[str, Figures]":
    from cli.commands.up import DEFAULT_MODEL
    from cli.demo import halves
    from cli.demo.playing import play
    from cli.demo.running import DemoFailed
    from cli.demo.table import figures
    from cli.embedded.data_dir import DataDir
    from cli.settings import CommandSettings

    home = DataDir(data_dir or CommandSettings().data_dir)
    model_dir = home.models / DEFAULT_MODEL
    if not (model_dir / "config.json").exists():
        raise DemoFailed(f"{model_dir} holds no model: run `make model`")
    told, interrupted = {}, threading.Event()
    for half in (halves.real(model_dir), halves.scale()):
        console.rule(half.title)
        ran = play(half, trace, DataDir(home.path / "demo" / half.directory), console, interrupted)
        told[half.name] = figures(ran)
    return told


def _show(told: "dict[str, Figures]", shifting: "Shifting", console: "Console", *, as_json: bool) -> None:
    import json

    from rich.console import Console

    from cli.demo.comparing import document
    from cli.demo.comparing import table as shifting_table
    from cli.demo.table import remarks, table
    from cli.invocation import command

    for remark in remarks(told):
        console.print(remark, style="yellow", markup=False)
    if as_json:
        print(json.dumps({**told, "in virtual time": document(shifting)}, indent=2))
        return
    Console().print(table(told))
    Console().print(shifting_table(shifting))
    print(f"""
Next: `make up` keeps the real system running. Load it and read what it decides:
  {command()} trace send --phase 40:1:tool-agent --shrink 0.03125
  {command()} events tail""")
