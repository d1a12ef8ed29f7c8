"""What simulations came to, for a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from simulation.policies.studies import Run, Spread, changes, figures

TIMES = {"mean_s": "mean", "p50_s": "P50", "p90_s": "P90", "p99_s": "P99", "queue_s": "queue", "short_mean_s": "short",
         "long_mean_s": "long"}  # fmt: skip
SHARES = {"attainment": "SLO tokens", "hit_rate": "hit rate", "utilisation": "GPUs busy"}


def runs_picture(title: str, runs: Sequence[Run]) -> RenderableType:
    """One line for each policy; with several seeds each figure is mean ± standard deviation over them."""
    by_policy = {run.policy: [each.outcome for each in runs if each.policy == run.policy] for run in runs}
    base = next(iter(by_policy.values()))
    table = Table(
        "TTFT, s", *TIMES.values(), *SHARES.values(), "unserved", "against the first", title=title, title_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, outcomes in by_policy.items():
        found = figures(outcomes)
        times = [_seconds(found[figure]) if figure in found else "-" for figure in TIMES]
        shares = [f"{found[figure].mean:.1%}" for figure in SHARES]
        against = "" if outcomes is base else _change(changes(outcomes, base))
        table.add_row(name, *times, *shares, f"{found['unserved'].mean:g}", against)
    return Group(table, *_notes(runs))


def _notes(runs: Sequence[Run]) -> list[str]:
    """What a table of means leaves out."""
    degrees = {run.policy: run.outcome.by_degree for run in runs}
    lines = [
        f"{name}: " + ", ".join(f"{n:,} at degree {c}" for c, n in found.items()) for name, found in degrees.items()
    ]
    moved = {run.policy: run.outcome.redirects for run in runs if run.outcome.redirects}
    return ["requests of the last seed by degree", *lines, *(f"{name}: {n} redirections" for name, n in moved.items())]


def _seconds(found: Spread) -> str:
    return f"{found.mean:.3f}" + (f" ±{found.sd:.3f}" if found.sd else "")


def _change(found: Spread) -> str:
    return f"{found.mean:+.1%}" + (f" ±{100 * found.sd:.1f}" if found.sd else "")
