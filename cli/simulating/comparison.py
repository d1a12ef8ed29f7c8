"""What was, what the simulator makes of it, and what might have been."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from cli.simulating.picture import SHARES, TIMES
from simulation.policies.recorded import Recorded
from simulation.policies.studies import FIGURES, Comparison, Spread, changes, figures

MODELLED = "Both simulated columns are modelled: prefill alone, in the seconds of {version}."

COLUMNS = ("recorded", "recorded policy, simulated", "error", "alternative, simulated", "change")


def comparison_picture(recorded: Recorded, found: Comparison) -> RenderableType:
    """One line for each figure."""
    title = f"{recorded.outcome.ttft.requests:,} completed requests, {len(found.alternative)} seeds"
    table = Table("", *COLUMNS, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    ours, theirs = figures(found.as_recorded), figures(found.alternative)
    for figure, name in {**{f: f"TTFT {n}, s" for f, n in TIMES.items()}, **SHARES}.items():
        if figure not in ours or figure not in theirs or (was := FIGURES[figure](recorded.outcome)) is None:
            continue
        error, change = ours[figure].mean - was, changes(found.alternative, found.as_recorded, figure)
        if figure in SHARES:
            cells = [f"{was:.1%}", _share(ours[figure]), f"{100 * error:+.1f} pt", _share(theirs[figure])]
            cells.append(f"{100 * (theirs[figure].mean - ours[figure].mean):+.1f} pt")
        else:
            cells = [
                f"{was:.3f}",
                _seconds(ours[figure]),
                f"{error / was:+.1%}" if was else "",
                _seconds(theirs[figure]),
            ]
            cells.append(f"{change.mean:+.1%} ±{100 * change.sd:.1f}")
        table.add_row(name, *cells)
    table.add_row(
        "unserved", str(recorded.outcome.unserved), f"{ours['unserved'].mean:g}", "", f"{theirs['unserved'].mean:g}", ""
    )
    modelled = MODELLED.format(version=recorded.setup.coefficients.version)
    return Group(table, *recorded.notes, modelled)


def comparison_document(recorded: Recorded, found: Comparison) -> dict[str, Any]:
    """The same as JSON: means and standard deviations over the seeds."""
    return {
        "modelled": MODELLED.format(version=recorded.setup.coefficients.version),
        "recorded": {name: figure(recorded.outcome) for name, figure in FIGURES.items()},
        "as_recorded": figures(found.as_recorded),
        "alternative": figures(found.alternative),
        "mean_change": changes(found.alternative, found.as_recorded),
        "notes": recorded.notes,
    }


def _seconds(found: Spread) -> str:
    return f"{found.mean:.3f} ±{found.sd:.3f}"


def _share(found: Spread) -> str:
    return f"{found.mean:.1%} ±{100 * found.sd:.1f}"
