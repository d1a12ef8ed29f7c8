"""Predicted against measured as a picture file: what the paper's Figure 4 shows, one panel for each degree."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from shared.model.cost import US_PER_S
from shared.model.fitting import Fit, Sample

FORMATS = ("png", "svg")
PANEL_INCHES = 3.1
HIT_NAMES = ("nothing cached", "up to half cached", "more cached")
HIT_COLOURS = ("#1b6ca8", "#d1782a", "#5a9e5a")
OTHER_COLOUR = "#9a9a9a"


def plot(path: Path, samples: Sequence[Sample], chosen: Fit, other: Fit, title: str) -> None:
    """Write the picture; the ending of the name says which kind. Errors: ValueError for one that is not of `FORMATS`."""
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}")
    degrees = list(chosen.by_degree)
    figure = Figure(figsize=(PANEL_INCHES * len(degrees) + 0.4, PANEL_INCHES + 0.9), layout="constrained")
    axes = figure.subplots(1, len(degrees), sharex=True, sharey=True, squeeze=False)[0]
    for axis, degree in zip(axes, degrees, strict=True):
        _panel(axis, [sample for sample in samples if sample.degree == degree], chosen, other)
        axis.set_title(f"degree {degree}: MAPE {chosen.by_degree[degree].mape:.1%}", fontsize=10)
        axis.set_xlabel("measured, s")
    axes[0].set_ylabel("predicted, s")
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(labels), len(degrees) + len(degrees) // 2)  # as many names as fit below so many panels
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=144)


def _panel(axis: Axes, samples: Sequence[Sample], chosen: Fit, other: Fit) -> None:
    measured = [sample.seconds for sample in samples]
    predicted = {
        fit.form: [fit.coefficients.prefill_us(*sample[:3]) / US_PER_S for sample in samples] for fit in (chosen, other)
    }
    axis.set_xscale("log")
    axis.set_yscale("log")
    ends = min(measured), max(measured)
    axis.axline((ends[0], ends[0]), (ends[1] * 2, ends[1] * 2), color="black", linewidth=0.8, zorder=1)
    axis.scatter(measured, predicted[other.form], s=26, facecolors="none", edgecolors=OTHER_COLOUR, label=other.form)
    for number, (name, colour) in enumerate(zip(HIT_NAMES, HIT_COLOURS, strict=True)):
        own = [i for i, sample in enumerate(samples) if _hit_class(sample) == number]
        x, y = [measured[i] for i in own], [predicted[chosen.form][i] for i in own]
        axis.scatter(x, y, s=20, color=colour, zorder=2, label=f"{chosen.form}, {name}")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter(StrMethodFormatter("{x:g}"))
        ticks.set_minor_formatter(NullFormatter())
    axis.grid(visible=True, linewidth=0.3)


def _hit_class(sample: Sample) -> int:
    """0 without a hit, 1 up to half of the prompt, 2 beyond."""
    share = sample.cached_tokens / (sample.cached_tokens + sample.uncached_tokens)
    return (share > 0) + (share > 0.5)
