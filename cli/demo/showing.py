"""What the demo looks like while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.demo.running import Verdict
from cli.trace.measuring import OK, Outcome
from simulation.workloads.rows import Row


@contextmanager
def requests_bar(console: Console, total: int, speedup: float) -> Iterator[Callable[[Row, Outcome], None]]:
    """A bar that each outcome moves on, with the mean TTFT so far and what went wrong."""
    answered = bad = 0
    ttft_s = 0.0
    with _bar(console, total) as move:

        def ended(_: Row, outcome: Outcome) -> None:
            nonlocal answered, bad, ttft_s
            if outcome.kind == OK:
                answered += 1
                ttft_s += outcome.late_s + outcome.ttft_s
            else:
                bad += 1
            mean = f"mean TTFT {speedup * ttft_s / answered:.2f} s" if answered else "no answer yet"
            move(answered + bad, f"{mean}, {bad} not answered" if bad else mean)

        yield ended


@contextmanager
def tokens_bar(console: Console, total: int) -> Iterator[Callable[[Verdict], None]]:
    """A bar over the answers that transformers has compared."""
    with _bar(console, total) as move:
        move(0, "transformers loads the same weights")
        yield lambda so_far: move(
            so_far["answers"], f"{so_far['equal']:,} of {so_far['positions']:,} tokens as transformers chooses"
        )


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("", total=total)
        yield lambda done, told: progress.update(bar, completed=done, description=told)
