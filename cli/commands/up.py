"""`vertumnus up`: the whole system on this machine, until Ctrl-C."""

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.status import Status

    from cli.embedded.data_dir import DataDir, RunningSystem

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

QUESTION = '{"role": "user", "content": "What is the capital of France?"}'
EXIT_FAILED = 1


def up(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept [VERTUMNUS_DATA_DIR, else .vertumnus]")
    ] = None,
    router_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one")] = 0,
    engine: Annotated[
        Literal["torch", "sglang", "modelled"],
        typer.Option(
            help="`torch` computes; `sglang` drives the servers that VERTUMNUS_SGLANG_SERVERS names; `modelled` only takes"
            " the time it would take"
        ),
    ] = "torch",
    model: Annotated[Path | None, typer.Option(help=f"Model directory [DATA_DIR/models/{DEFAULT_MODEL}]")] = None,
    composition: Annotated[
        str, typer.Option(help="First degrees of the workers from rank 0 up; their sum is the number of ranks")
    ] = "1,1,2,4",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON once everything is ready")] = False,
) -> None:
    """Run NATS, Postgres and the five services on this machine until Ctrl-C.

    Ctrl-C stops everything in order, a second one at once. The next `up` resumes from the same data.
    """
    from cli.embedded.data_dir import AlreadyRunning, DataDir
    from cli.embedded.environment import SystemChoices
    from cli.embedded.processes import StartFailed
    from cli.embedded.supervisor import GaveUp, Interrupted, stop_on_signals
    from cli.embedded.system import EmbeddedSystem
    from cli.settings import CommandSettings
    from shared.model.lattice import parse_composition

    settings = CommandSettings()
    home = DataDir(data_dir or settings.data_dir)
    try:
        choices = SystemChoices(engine, _model_dir(engine, model, home), parse_composition(composition), router_port)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--composition") from error

    interrupted = threading.Event()
    system = EmbeddedSystem(home, choices, settings, say, interrupted)
    stop_on_signals(interrupted, system.supervisor)
    begun = time.monotonic()
    try:
        with home.locked(), spinner() as starting, system.running() as running:
            starting.stop()
            print(describe(running, time.monotonic() - begun, as_json=as_json), flush=True)
            system.supervisor.watch()
    except Interrupted:
        say("stopped while starting")
    except (AlreadyRunning, StartFailed, GaveUp, OSError) as failure:
        say(f"vertumnus up: {failure}")
        raise typer.Exit(EXIT_FAILED) from failure


def _model_dir(engine: str, asked: Path | None, home: "DataDir") -> Path | None:
    """The model to serve. The modelled engine does without, but takes the tokenizer of one that is there."""
    directory = (asked or home.models / DEFAULT_MODEL).resolve()
    if (directory / "config.json").exists():
        return directory
    if engine == "modelled" and asked is None:
        return None
    raise typer.BadParameter(f"{directory} holds no model: run `make model`, or name one", param_hint="--model")


def say(line: str) -> None:
    """Progress, on stderr: `--json` leaves stdout to the program that reads it."""
    # A terminal that was closed has nobody to tell, and what runs still has to be stopped in order.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def spinner() -> "Status":
    """Shows on a terminal that the start goes on; lines that are said meanwhile appear above it."""
    from rich.console import Console

    return Console(stderr=True).status("starting")


def describe(system: "RunningSystem", seconds: float, *, as_json: bool) -> str:
    """What the user wants to know once the system runs. The JSON form holds no credentials."""
    if as_json:
        import json

        services = {name: service.model_dump(mode="json") for name, service in system.services.items()}
        addresses = {"api_url": f"{system.api_url}/v1", "console_url": system.console_url}
        return json.dumps({"pid": system.pid, "ready_s": round(seconds, 1), **addresses, "services": services})

    from cli.invocation import command

    return f"""
Vertumnus is ready ({seconds:.1f} s)
  API      {system.api_url}/v1
  record   {system.console_url}/docs (the key is in {system.operator_key_file})
  logs     {system.services["router"].log.parent}

Ask it something:
{example(system)}

Ctrl-C stops it; the next `{command()} up` goes on from here."""


def example(system: "RunningSystem") -> str:
    """A request that this very system answers. Without a tokenizer it takes token ids only."""
    import httpx

    served = httpx.get(f"{system.api_url}/v1/models").raise_for_status().json()["data"]
    model = served[0]["id"] if served else "<model>"
    if system.tokenizer:
        path, prompt = "chat/completions", f'"temperature": 0,\n         "messages": [{QUESTION}]'
    else:
        path, prompt = "completions", '"prompt": [11, 12, 13, 14, 15, 16, 17, 18], "max_tokens": 8'
    return f"""\
  curl -s {system.api_url}/v1/{path} -H 'content-type: application/json' \\
    -d '{{"model": "{model}", {prompt}}}'"""
