"""Run one half: start its system, send its requests, let the record settle, audit it."""

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.demo.halves import Half
from cli.embedded.data_dir import DataDir, RunningSystem
from cli.embedded.system import EmbeddedSystem
from cli.settings import CommandSettings
from cli.trace.measuring import OK, Outcome, Report
from cli.trace.prompts import prompt_tokens
from cli.trace.rows import Row
from cli.trace.sending import Target, first_model, send
from services.ledger.audit import Audit, audit
from shared.runtime.clock import SystemClock

SETTLE_S = 30.0
"""The ledger is at most this far behind when the last answer has come."""

RECHECK_S = 600.0


class Ran(NamedTuple):
    """What one half showed. Times in `report` are of the clients' clock."""

    half: Half
    report: Report
    audit: Audit
    answers: list[tuple[Row, Outcome]]


class DemoFailed(Exception):
    """A half did not do what it must. The message says what."""


@contextmanager
def system_of(half: Half, home: Path, console: Console) -> Iterator[RunningSystem]:
    """The half's system, in a fresh directory of its own."""
    shutil.rmtree(home, ignore_errors=True)
    directory = DataDir(home)
    embedded = EmbeddedSystem(directory, half.choices, CommandSettings(), console.print, threading.Event())
    with directory.locked(), embedded.running() as running:
        yield running


def run(half: Half, rows: list[Row], running: RunningSystem, console: Console) -> Ran:
    """Send `rows` with live progress and audit what was recorded. Errors: DemoFailed, NoServer."""
    answers: list[tuple[Row, Outcome]] = []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("", total=len(rows))

        def ended(row: Row, outcome: Outcome) -> None:
            answers.append((row, outcome))
            progress.update(bar, advance=1, description=_standing(answers, half.speedup))

        report, record = asyncio.run(_serve(half, rows, running, ended))
    return Ran(half, report, record, answers)


async def _serve(
    half: Half, rows: list[Row], running: RunningSystem, ended: Callable[[Row, Outcome], None]
) -> tuple[Report, Audit]:
    model = await first_model(running.api_url)
    target = Target(running.api_url, model, concurrency=half.concurrency, objective=half, token_ids=True)
    report = await send(rows, target, SystemClock(), ended)
    return report, await _settled_audit(running.database_url, len(rows))


async def _settled_audit(database_url: str, requests: int) -> Audit:
    """The audit once the ledger has copied the last end. Errors: DemoFailed."""
    clock = SystemClock()
    deadline_ns = clock.monotonic_ns() + round(SETTLE_S * 1e9)
    while True:
        found = await audit(database_url, settled=True)
        if found.requests >= requests and not found.open_requests:
            return found
        if clock.monotonic_ns() > deadline_ns:
            raise DemoFailed(
                f"after {SETTLE_S:.0f} s the record has {found.requests} of {requests} requests, "
                f"{len(found.open_requests)} of them open"
            )
        await clock.sleep(0.5)


def recheck(model_dir: Path, answers: list[tuple[Row, Outcome]]) -> dict[str, int]:
    """Compare every greedy answer with transformers on the same weights. Errors: DemoFailed."""
    lines = b"".join(
        orjson.dumps({"prompt": prompt_tokens(row).tolist(), "output": outcome.token_ids}) + b"\n"
        for row, outcome in answers
        if outcome.kind == OK and outcome.token_ids
    )
    command = [sys.executable, "-P", "-m", "services.worker.engine.torch.recheck", str(model_dir)]
    done = subprocess.run(command, input=lines, capture_output=True, timeout=RECHECK_S, check=False)
    if done.returncode:
        raise DemoFailed(f"the comparison with transformers failed: {done.stderr.decode(errors='replace')[-500:]}")
    verdict: dict[str, int] = orjson.loads(done.stdout)
    return verdict


def _standing(answers: list[tuple[Row, Outcome]], speedup: float) -> str:
    """Mean TTFT so far, and what went wrong."""
    good = [outcome.late_s + outcome.ttft_s for _, outcome in answers if outcome.kind == OK]
    mean = f"mean TTFT {speedup * sum(good) / len(good):.2f} s" if good else ""
    bad = len(answers) - len(good)
    return f"{mean}, {bad} not answered" if bad else mean
