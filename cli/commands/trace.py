"""`vertumnus trace`: look at a trace, change it, make one up, send it to a running system."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, NamedTuple

import orjson
import typer
from rich.console import Console
from rich.markup import escape

from cli.files import whole
from cli.terminal import output, reason
from cli.trace.measuring import OK, LinearObjective, Outcome, Report, report
from simulation.workloads import shaping
from simulation.workloads.catalogue import WORKLOADS
from simulation.workloads.files import read
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.rows import (
    BLOCK_TOKENS,
    BLOCK_TOKENS_MIN,
    OUTPUT_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    Row,
    write,
)

if TYPE_CHECKING:
    from cli.trace.sending import Target

SECONDS_MAX, DAY_MS = 1e9, 86_400_000
"""Thirty years, and what a time in milliseconds may be: without a limit an option would take `inf`."""

app = typer.Typer(help="Traces of requests: inspect, convert, generate, send.", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, readable=True, help="a trace in Mooncake's format, or Azure's (.csv)"),
]
OutFile = Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="the file to write")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
Seed = Annotated[int, typer.Option(help="equal seeds give equal traces")]
BlockTokens = Annotated[int, typer.Option(min=BLOCK_TOKENS_MIN, help="what one hash id of the file stands for")]
StartS = Annotated[float, typer.Option(min=0, max=SECONDS_MAX, help="leave out what arrives before")]
EndS = Annotated[float, typer.Option(min=0, help="leave out what arrives later")]
Limit = Annotated[int | None, typer.Option(min=1, help="requests at most")]
Speed = Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="how many times as fast as the trace")]
Rate = Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="mean requests/s instead of the trace's own")]
JitterMs = Annotated[float | None, typer.Option(min=0, max=DAY_MS, help="spread arrivals by this [the grid found]")]
Shrink = Annotated[
    float, typer.Option(min=0, max=1, help="this factor on all lengths; what prompts share stays shared")
]
MaxPrompt = Annotated[int, typer.Option(min=1, help="cut longer prompts to this many tokens")]
MaxOutput = Annotated[int, typer.Option(min=1, help="ask for at most this many tokens")]
PhaseTexts = Annotated[
    list[str],
    typer.Option(
        "--phase", metavar="SECONDS:RATE:SHAPE", help=f"repeat for load that shifts; shapes: {', '.join(SHAPES)}"
    ),
]
DEFAULT_PHASES = ["600:4:conversation"]
Workload = Annotated[str | None, typer.Option(help=f"in place of phases, one of {', '.join(WORKLOADS)}")]

errors = Console(stderr=True, soft_wrap=True)


class Shaping(NamedTuple):
    """The options that `convert` and `send` share."""

    start_s: float
    end_s: float
    limit: int | None
    speed: float | None
    rate: float | None
    jitter_ms: float | None
    shrink: float
    max_prompt: int
    max_output: int
    seed: int

    def apply(self, source: Callable[[], Iterator[Row]]) -> tuple[int, Iterator[Row]]:
        """How many rows, and the rows. Reads the source twice, so a bad row is refused before the first is used."""
        from simulation.workloads.statistics import statistics

        found = statistics(self._slice(source()))
        jitter_ms = found.arrival_grid_ms if self.jitter_ms is None else self.jitter_ms
        speed = (self.speed or 1.0) if self.rate is None else self.rate / found.requests_per_s
        rows = shaping.at_speed(shaping.jittered(self._slice(source()), jitter_ms, Random(self.seed)), speed)
        return found.requests, shaping.capped(shaping.shrunk(rows, self.shrink), self.max_prompt, self.max_output)

    def _slice(self, rows: Iterator[Row]) -> Iterator[Row]:
        return shaping.sliced(rows, self.start_s * 1000, self.end_s * 1000, self.limit)


@app.command()
def inspect(
    file: File,
    block_tokens: BlockTokens = BLOCK_TOKENS,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="a picture, .png or .svg")] = None,
    json: Json = False,
) -> None:
    """Lengths, long share, ideal hit rate and burstiness of a trace."""
    from cli.trace.picture import statistics_picture
    from simulation.workloads.statistics import statistics

    with refusals():
        found = statistics(read(file, block_tokens))
        if plot is not None:
            from cli.trace.plotting import plot as write_plot

            write_plot(plot, file.name, found)
    if json:
        print_json(found)
    else:
        output().print(statistics_picture(file.name, found))


@app.command()
def convert(
    file: File,
    out: OutFile,
    start_s: StartS = 0,
    end_s: EndS = float("inf"),
    limit: Limit = None,
    speed: Speed = None,
    rate: Rate = None,
    jitter_ms: JitterMs = None,
    shrink: Shrink = 1,
    max_prompt: MaxPrompt = PROMPT_TOKENS_MAX,
    max_output: MaxOutput = OUTPUT_TOKENS_MAX,
    seed: Seed = 1,
    block_tokens: BlockTokens = BLOCK_TOKENS,
) -> None:
    """Slice, spread, speed up or shrink a trace. A shrunk one has smaller blocks: name their size when you read it."""
    with refusals():
        options = Shaping(start_s, end_s, limit, speed, rate, jitter_ms, shrink, max_prompt, max_output, seed)
        count, rows = options.apply(lambda: read(file, block_tokens))
        _write(rows, out)
    errors.print(f"{out}: {count:,} requests, {round(block_tokens * shrink)} tokens to a block")


@app.command()
def generate(out: OutFile, phase: PhaseTexts = DEFAULT_PHASES, workload: Workload = None, seed: Seed = 1) -> None:
    """Make up a trace: sessions with shared system prompts and growing prefixes, Poisson arrivals."""
    with refusals():
        count = _write(made_up(phase, workload)(Random(seed)), out)
    errors.print(f"{out}: {count:,} requests")


@app.command()
def send(
    file: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="a trace; made up when left out")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="of the server, without /v1 [default: the system that runs in the data directory]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="[default: the first the server offers]")] = None,
    api_key_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="a file with the key")] = None,
    text: Annotated[
        bool, typer.Option("--text/--token-ids", help="chat messages of words, or completions of ids")
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, max=16384, help="open requests at most; beyond, requests are late")
    ] = 1024,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86_400, help="longest silence within an answer")] = 600,
    slo_ms: Annotated[float | None, typer.Option(min=1, max=DAY_MS, help="TTFT objective of an empty prompt")] = None,
    slo_ms_per_1k: Annotated[float, typer.Option(min=0, max=DAY_MS, help="and for each thousand tokens of prompt")] = 0,
    phase: PhaseTexts = DEFAULT_PHASES,
    workload: Workload = None,
    start_s: StartS = 0,
    end_s: EndS = float("inf"),
    limit: Limit = None,
    speed: Speed = None,
    rate: Rate = None,
    jitter_ms: JitterMs = None,
    shrink: Shrink = 1,
    max_prompt: MaxPrompt = PROMPT_TOKENS_MAX,
    max_output: MaxOutput = OUTPUT_TOKENS_MAX,
    seed: Seed = 1,
    block_tokens: BlockTokens = BLOCK_TOKENS,
    json: Json = False,
) -> None:
    """Send a trace through the OpenAI API and report what the clients saw.

    Exit status: 0 when every request was answered or refused by admission (429, 503), 1 when any failed otherwise.
    """
    from cli.trace.picture import report_picture
    from cli.trace.sending import Target
    from cli.whereabouts import api_url

    url = url or api_url()
    options = Shaping(start_s, end_s, limit, speed, rate, jitter_ms, shrink, max_prompt, max_output, seed)
    objective = None if slo_ms is None else LinearObjective(slo_ms / 1000, slo_ms_per_1k / 1000)
    key = None if api_key_file is None else api_key_file.read_text().strip()
    with refusals():
        made = made_up(phase, workload)
        count, rows = options.apply(lambda: made(Random(seed)) if file is None else read(file, block_tokens))
        target = Target(url, model or _first_model(url, key), key, text, concurrency, timeout_s, objective)
    found, interrupted = _send_with_progress(count, rows, target)
    if json:
        print_json(found)
    else:
        output().print(report_picture(found))
    if interrupted:
        raise typer.Exit(130)
    if found.failed:
        raise typer.Exit(1)


def _send_with_progress(count: int, rows: Iterator[Row], target: "Target") -> tuple[Report, bool]:
    """The report, and whether it is of the part that was answered when Ctrl-C came."""
    import uvloop
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cli.trace.sending import send as send_trace
    from shared.runtime.clock import SystemClock

    clock, outcomes, bad = SystemClock(), list[Outcome](), 0
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, refresh_per_second=2) as progress:
        bar = progress.add_task("ended", total=count)

        def ended(_: Row, outcome: Outcome) -> None:
            nonlocal bad
            outcomes.append(outcome)
            bad += outcome.kind != OK
            progress.update(bar, advance=1, description=f"ended, {bad} not answered")

        start_ns = clock.monotonic_ns()
        try:
            return uvloop.run(send_trace(rows, target, clock, ended)), False
        except KeyboardInterrupt:
            return report(outcomes, (clock.monotonic_ns() - start_ns) / 1e9, target.objective), True


def _first_model(url: str, api_key: str | None) -> str:
    from cli.trace.sending import first_model

    return asyncio.run(first_model(url, api_key))


def made_up(phases: list[str], workload: str | None) -> Callable[[Random], Iterator[Row]]:
    """What `--phase` and `--workload` ask for. Errors: ValueError naming the one that cannot be had."""
    if workload is None:
        return partial(generated, _phases(phases))
    if workload not in WORKLOADS:
        raise ValueError(f"--workload {workload}: must be one of {', '.join(WORKLOADS)}")
    return WORKLOADS[workload]


def _phases(texts: list[str]) -> list[Phase]:
    phases = []
    for text in texts:
        parts = text.split(":")
        if len(parts) != 3 or parts[2] not in SHAPES:
            raise ValueError(f"--phase {text}: must be SECONDS:RATE:SHAPE with a shape of {', '.join(SHAPES)}")
        try:
            phases.append(Phase(float(parts[0]), float(parts[1]), SHAPES[parts[2]]))
        except ValueError as error:
            raise ValueError(f"--phase {text}: {error}") from None
    return phases


def _write(rows: Iterator[Row], out: Path) -> int:
    with whole(out) as file:
        return write(rows, file)


def print_json(value: object) -> None:
    """One JSON value on standard output, named tuples as objects."""
    sys.stdout.buffer.write(
        orjson.dumps(value, default=_as_object, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    )


def _as_object(value: object) -> dict[str, object]:
    """orjson hands over named tuples."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    raise TypeError(type(value).__name__)


@contextmanager
def refusals() -> Iterator[None]:
    """What a user can put right ends the command with one line and status 2."""
    from cli.trace.sending import NoServer

    try:
        yield
    except (ValueError, OSError, NoServer) as error:
        errors.print(f"[red]error:[/red] {escape(reason(error))}")
        raise typer.Exit(2) from error
