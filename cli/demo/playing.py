"""One half from its first process to its last figure."""

import threading
from pathlib import Path

from rich.console import Console

from cli.demo.halves import Half
from cli.demo.running import Answers, Ran, compared, served_and_moved, settled_audit
from cli.demo.showing import requests_bar, tokens_bar
from cli.demo.stage import Stage
from cli.embedded.data_dir import DataDir
from cli.trace.measuring import Outcome
from simulation.workloads.rows import Row


def play(half: Half, trace: Path | None, home: DataDir, console: Console, interrupted: threading.Event) -> Ran:
    """Start the half's system in `home`, serve it the trace, examine what it recorded and compare what it answered.

    Errors: BadRow, ValueError of the trace; AlreadyRunning, StartFailed, GaveUp, NoServer, NotMoved, DemoFailed, OSError of
    the system; Interrupted once `interrupted` is set, as Ctrl-C does. Whatever it is, nothing is left running.
    """

    def say(line: str) -> None:
        console.print(line, style="dim", markup=False)

    rows = half.rows(trace)
    answers: Answers = []
    stage = Stage(half, home, say, interrupted)
    starting = console.status("starting")
    with starting, stage.running() as system:
        starting.stop()
        with requests_bar(console, len(rows), half.speedup) as show:

            def ended(row: Row, outcome: Outcome) -> None:
                answers.append((row, outcome))
                show(row, outcome)

            report, moved = stage.wait(served_and_moved(half, rows, system, ended))
        with console.status("waiting for the record, and examining it"):
            record = stage.wait(settled_audit(system.database_url, report.ok))
    model_dir, verdict = half.choices.model_dir, None
    if model_dir is not None:
        # After the end of the ranks, which leave it their memory and their processors.
        with tokens_bar(console, report.ok) as compared_so_far:
            verdict = stage.wait(compared(model_dir, answers, compared_so_far))
    return Ran(half, report, record, verdict, moved)
