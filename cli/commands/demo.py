"""`vertumnus demo`: what the system does, in a few minutes, on this machine."""

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1

NEXT = """Next:
  vertumnus up               keep the real system running
  vertumnus trace send       load it with a trace
  vertumnus events tail      read what it decides"""


def demo(
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A trace in Mooncake's format [made up]")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept [VERTUMNUS_DATA_DIR, else .vertumnus]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON on standard output")] = False,
) -> None:
    """Serve a small real model, then forty modelled GPUs, and show what both did.

    Exit status: 0 when every request was answered, every token is the reference's and the record is whole.
    """
    from rich.console import Console

    from cli.demo.running import DemoFailed
    from cli.embedded.data_dir import AlreadyRunning
    from cli.embedded.processes import StartFailed
    from cli.trace.sending import NoServer

    def on_sigterm(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the shape that signal handlers have
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_sigterm)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        told = _both_halves(trace, data_dir, console)
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(130) from None
    except (DemoFailed, AlreadyRunning, StartFailed, NoServer, ValueError, OSError) as failure:
        console.print(f"vertumnus demo: {failure}", style="red", markup=False)
        raise typer.Exit(EXIT_FAILED) from failure
    _show(told, as_json=as_json)
    if not all(_good(each) for each in told.values()):
        raise typer.Exit(EXIT_FAILED)


def _both_halves(trace: Path | None, data_dir: Path | None, console: "Console") -> dict[str, dict[str, Any]]:
    from cli.commands.up import DEFAULT_MODEL
    from cli.demo import halves, running
    from cli.demo.table import figures
    from cli.embedded.data_dir import DataDir
    from cli.settings import CommandSettings

    home = DataDir(data_dir or CommandSettings().data_dir)
    model_dir = home.models / DEFAULT_MODEL
    if not (model_dir / "config.json").exists():
        raise running.DemoFailed(f"{model_dir} holds no model: run `make model`")
    told = {}
    real, scale = halves.real(model_dir), halves.scale()

    console.rule("1. real: SmolLM2-135M, torch engine, 8 CPU ranks as 2 CP1 + 1 CP2 + 1 CP4")
    with running.system_of(real, home.path / "demo" / "real", console) as system:
        ran = running.run(real, real.rows(trace), system, console)
        console.print(f"comparing {ran.report.ok} answers with transformers on the same weights …")
        verdict = running.recheck(model_dir, ran.answers)
    told["real, 8 CPU ranks"] = figures(ran, verdict)

    console.rule(
        f"2. at scale: the same services over 40 modelled GPUs as 4CP4/3CP8, {scale.speedup:g}× as fast as life"
    )
    with running.system_of(scale, home.path / "demo" / "scale", console) as system:
        ran = running.run(scale, scale.rows(trace), system, console)
    told["modelled, 40 GPUs"] = figures(ran, None)
    return told


def _show(told: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    from rich.console import Console

    from cli.demo.table import table

    if as_json:
        import json

        print(json.dumps(told, indent=2))
        return
    Console().print(table(told))
    print(NEXT)


def _good(figures: dict[str, Any]) -> bool:
    exact = figures["transformers"] is None or not figures["transformers"]["mismatches"]
    return exact and not figures["not_answered"] and not figures["audit_violations"]
