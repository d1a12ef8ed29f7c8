"""Figures as PNG and SVG: policies over load, policies side by side, one figure over a parameter."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulation.policies.studies import Run, Spread, figures

FORMATS = ("png", "svg")
COLOURS = (
    "#1b6ca8", "#d1782a", "#5a9e5a", "#a23b72", "#7a6c5d", "#3aa6a6", "#c9a227", "#6b5b95", "#888888", "#b5534c", "#2f4858",
    "#90be6d",
)  # fmt: skip
PANEL_INCHES = 3.4

Line = Mapping[float, Spread]
"""A figure by what is on the x axis."""


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """`name` in each format. Errors: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=144)
    return paths


def lines(
    panels: Mapping[str, Mapping[str, Line]], x_label: str, y_label: str, title: str, logarithmic: bool
) -> Figure:
    """One panel for each workload, one line for each policy, bars for the spread."""
    figure = Figure(figsize=(PANEL_INCHES * len(panels) + 0.6, PANEL_INCHES + 0.7), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, of_policy) in zip(axes, panels.items(), strict=True):
        _lines(axis, of_policy, logarithmic)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(x_label)
    axes[0].set_ylabel(y_label)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def _lines(axis: Axes, of_policy: Mapping[str, Line], logarithmic: bool) -> None:
    for (name, line), colour in zip(of_policy.items(), cycle(COLOURS), strict=False):
        means, sds = [each.mean for each in line.values()], [each.sd for each in line.values()]
        axis.errorbar(list(line), means, yerr=sds, label=name, color=colour, marker="o", markersize=3, capsize=2)
    axis.set_yscale("log" if logarithmic else "linear")
    axis.grid(visible=True, which="both", linewidth=0.3)


def bars(values: Mapping[str, Spread], x_label: str, title: str) -> Figure:
    """Shares of something, one below the other, with lines for the spread."""
    figure = Figure(figsize=(2.4 * PANEL_INCHES, 0.2 * len(values) + 1), layout="constrained")
    axis = figure.subplots()
    means, sds = [100 * each.mean for each in values.values()], [100 * each.sd for each in values.values()]
    axis.barh(list(values), means, xerr=sds, color=COLOURS[0], ecolor=COLOURS[-1], capsize=2)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel(f"{x_label}, %")
    axis.grid(visible=True, axis="x", linewidth=0.3)
    figure.suptitle(title, fontsize=10)
    return figure


def sides(runs: Sequence[Run], title: str) -> Figure:
    """Mean and P90 of each policy, and the distribution of its TTFT."""
    names = list(dict.fromkeys(run.policy for run in runs))
    figure = Figure(figsize=(2.4 * PANEL_INCHES, PANEL_INCHES + 0.5), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    for place, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        own = [run for run in runs if run.policy == name]
        found = figures([run.outcome for run in own])
        for offset, kind, alpha in ((-0.2, "mean_s", 1.0), (0.2, "p90_s", 0.5)):
            bars.bar(place + offset, found[kind].mean, 0.38, yerr=found[kind].sd, color=colour, alpha=alpha, capsize=2)
        seconds = sorted(each / 1e6 for run in own for each in run.rows.column("ttft_us"))
        shares = [(rank + 1) / len(seconds) for rank in range(len(seconds))]
        curves.plot(seconds, shares, color=colour, linewidth=1.2, label=name)
    bars.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    bars.set_ylabel("TTFT, s: mean, and P90 (pale)")
    curves.set_xscale("log")
    curves.set_xlabel("TTFT, s")
    curves.set_ylabel("share of requests")
    curves.legend(frameon=False, fontsize=8)
    for axis in (bars, curves):
        axis.grid(visible=True, linewidth=0.3)
    figure.suptitle(title, fontsize=11)
    return figure
