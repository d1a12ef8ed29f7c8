"""Fits for a terminal: both forms side by side, and predicted against measured for each degree (the paper's Figure 4)."""

from collections.abc import Sequence
from math import log10

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shared.model.cost import US_PER_S, Coefficients
from shared.model.fitting import NAMES, Errors, Fit, Sample

WIDTH, HEIGHT = 34, 13


def fits_picture(samples: Sequence[Sample], fits: Sequence[Fit], chosen: Fit) -> RenderableType:
    """Errors, coefficients, and a scatter of the chosen form."""
    return Group(_errors(fits), _coefficients(fits), scatters(samples, chosen))


def _errors(fits: Sequence[Fit]) -> Table:
    table = Table(title="relative error", title_justify="left")
    table.add_column("degree")
    table.add_column("points", justify="right")
    for fit in fits:
        table.add_column(f"{fit.form}: MAPE", justify="right")
        table.add_column("worst", justify="right")
    first = fits[0]
    for degree, found in first.by_degree.items():
        _add(table, str(degree), found, [fit.by_degree[degree] for fit in fits])
    table.add_section()
    _add(table, "all", first.errors, [fit.errors for fit in fits])
    if first.held_out is not None:
        _add(table, "held out", first.held_out, [fit.held_out for fit in fits if fit.held_out is not None])
    return table


def _add(table: Table, name: str, first: Errors, found: Sequence[Errors]) -> None:
    cells = [f"{error:.1%}" for errors in found for error in (errors.mape, errors.worst)]
    table.add_row(name, str(first.samples), *cells)


def _coefficients(fits: Sequence[Fit]) -> Table:
    table = Table(title="E_C(R, P) = d + aR + bP + g(C-1) + (cR + αW)/C, seconds", title_justify="left")
    table.add_column("form")
    for name in NAMES:
        table.add_column(name, justify="right")
    for fit in fits:
        table.add_row(fit.form, *(f"{getattr(fit.coefficients, name):.3g}" for name in NAMES))
    return table


def scatters(samples: Sequence[Sample], chosen: Fit) -> RenderableType:
    """One panel for each degree, all with the same axes: points on the dots are predicted exactly."""
    panels = []
    low, high = _range(samples, chosen.coefficients)
    for degree, errors in chosen.by_degree.items():
        own = [sample for sample in samples if sample.degree == degree]
        text = _scatter(own, chosen.coefficients, low, high)
        panels.append(
            Panel.fit(text, title=f"degree {degree}, MAPE {errors.mape:.1%}", subtitle=f"{low:.3g} to {high:.3g} s")
        )
    return Group(Text(f"predicted (up) against measured (right), {chosen.form}, logarithmic"), Columns(panels))


def _range(samples: Sequence[Sample], coefficients: Coefficients) -> tuple[float, float]:
    both = [each for sample in samples for each in (sample.seconds, _predicted_s(sample, coefficients)) if each > 0]
    return min(both), max(both)


def _predicted_s(sample: Sample, coefficients: Coefficients) -> float:
    return coefficients.prefill_us(*sample[:3]) / US_PER_S


def _scatter(samples: Sequence[Sample], coefficients: Coefficients, low: float, high: float) -> Text:
    def place(seconds: float, cells: int) -> int:
        share = (log10(max(seconds, low)) - log10(low)) / (log10(high) - log10(low) or 1)
        return round(share * (cells - 1))

    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for x in range(WIDTH):
        grid[round(x * (HEIGHT - 1) / (WIDTH - 1))][x] = "·"
    for sample in samples:
        grid[place(_predicted_s(sample, coefficients), HEIGHT)][place(sample.seconds, WIDTH)] = "●"
    return Text("\n".join("".join(line) for line in reversed(grid)))
