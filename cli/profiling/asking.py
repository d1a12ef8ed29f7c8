"""What a user asks of `profile`, `fit` and `capacity`: options read, settings made, and refusals in one line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape

from cli.commands.up import DEFAULT_MODEL
from cli.embedded.data_dir import DataDir
from cli.profiling.prefills import NotResident
from cli.settings import CommandSettings
from cli.terminal import reason
from services.worker.engine.protocol import EngineError
from services.worker.settings import WorkerSettings
from shared.model.lattice import DEGREES

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
NUMBERS_MAX = 1_000

_N = TypeVar("_N", int, float)


def numbers(option: str, text: str, kind: Callable[[str], _N]) -> tuple[_N, ...]:
    """`"1,2,4"` as numbers, each once. Errors: ValueError names the option."""
    parts = text.split(",")
    if len(parts) > NUMBERS_MAX:
        raise ValueError(f"{option}: {len(parts)} numbers; {NUMBERS_MAX} at most")
    try:
        return tuple(dict.fromkeys(map(kind, parts)))
    except ValueError:
        raise ValueError(f"{option} {text[:80]!r}: give numbers separated by commas") from None


def worker_settings(engine: str, model: Path | None, degrees: tuple[int, ...], **more: Any) -> WorkerSettings:
    """Those of a worker with these degrees that only prefills. `VERTUMNUS_*` set the rest, such as the block size.

    Errors: ValueError names the setting and its limit.
    """
    if unknown := [degree for degree in degrees if degree not in DEGREES]:
        raise ValueError(f"--degrees {unknown}: each must be one of {', '.join(map(str, DEGREES))}")
    chosen = {"engine": engine, "node": "profile", "nodes": 1, "speedup": 1.0, "decode_ranks": 0, **more}
    if engine == "torch":
        directory = (model or DataDir(CommandSettings().data_dir).models / DEFAULT_MODEL).resolve()
        if not (directory / "config.json").exists():
            raise ValueError(f"--model: {directory} holds no model: run `make model`, or name one")
        chosen["model_dir"] = directory
    elif engine == "sglang" and model is not None:
        chosen["model_dir"] = model.resolve()
    try:
        return WorkerSettings(**chosen, prefill_ranks=max(degrees))
    except ValidationError as error:
        raise ValueError(reason(error)) from None


def write_json(document: BaseModel, file: BinaryIO) -> None:
    """For people as well: a field to a line."""
    file.write(document.model_dump_json(indent=1).encode() + b"\n")


@contextmanager
def refusals(verb: str, console: Console) -> Iterator[None]:
    """What a user can put right ends the command with one line and status 2, a failed measurement with 1."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped before the end: nothing was written")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (EngineError, NotResident) as failure:
        console.print(f"[red]vertumnus {verb}:[/red] {escape(str(failure))}")
        raise typer.Exit(EXIT_FAILED) from failure
    except (ValueError, OSError) as error:
        console.print(f"[red]vertumnus {verb}:[/red] {escape(reason(error))}")
        raise typer.Exit(EXIT_REFUSED) from error
