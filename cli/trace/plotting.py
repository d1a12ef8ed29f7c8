"""A trace as a picture file: how long its prompts are, when they come, and how much of them an endless cache would have."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from simulation.workloads.statistics import COUNT_S, LONG_TOKENS, Statistics

FORMATS = ("png", "svg")
REQUESTS_COLOUR, TOKENS_COLOUR, HIT_COLOUR = "#1b6ca8", "#d1782a", "#5a9e5a"
POINTS_MAX = 120
"""Over time; more would be noise."""


def plot(path: Path, name: str, statistics: Statistics) -> None:
    """Write the picture; the ending of the file's name says which kind. Errors: ValueError for one not of `FORMATS`."""
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"--plot {path}: the name must end in one of {', '.join(FORMATS)}")
    figure = Figure(figsize=(12.5, 3.6), layout="constrained")
    lengths, arrivals, hits = figure.subplots(1, 3)
    _lengths(lengths, statistics)
    _over_time(arrivals, hits, statistics)
    figure.suptitle(
        f"{name}: {statistics.requests:,} requests in {statistics.seconds:,.0f} s, "
        f"{statistics.prompt_tokens.mean:,.0f} prompt tokens in the mean, "
        f"{statistics.long_requests_share:.1%} longer than {LONG_TOKENS // 1024}K",
        fontsize=11,
    )
    figure.savefig(path, dpi=144)


def _lengths(axis: Axes, statistics: Statistics) -> None:
    bins = statistics.length_bins
    tokens = sum(each.tokens for each in bins)
    places = range(len(bins))
    axis.bar([x - 0.2 for x in places], [each.requests / statistics.requests for each in bins], 0.4,
             color=REQUESTS_COLOUR, label="of the requests")  # fmt: skip
    axis.bar([x + 0.2 for x in places], [each.tokens / tokens for each in bins], 0.4,
             color=TOKENS_COLOUR, label="of their tokens")  # fmt: skip
    axis.set_xticks(places, [_short(each.tokens_from) for each in bins], fontsize=8)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.set_title("prompt lengths", fontsize=10)
    axis.set_xlabel("tokens, from")
    axis.legend(frameon=False, fontsize=9)


def _over_time(arrivals: Axes, hits: Axes, statistics: Statistics) -> None:
    step = -(-len(statistics.arrivals) // POINTS_MAX)
    # The last bucket is cut short by the end of the trace.
    whole = max(1, (len(statistics.arrivals) - 1) // step) * step
    requests = _sums(statistics.arrivals[:whole], step)
    minutes = [(i + 0.5) * step * COUNT_S / 60 for i in range(len(requests))]
    arrivals.plot(minutes, [each / (step * COUNT_S) for each in requests], color=REQUESTS_COLOUR, linewidth=1)
    arrivals.set_title(f"arrivals, burstiness {statistics.burstiness:.2f} per {COUNT_S} s", fontsize=10)
    arrivals.set_ylabel("requests per second")
    arrivals.set_ylim(bottom=0)
    tokens, had = _sums(statistics.arrived_tokens[:whole], step), _sums(statistics.hit_tokens[:whole], step)
    shares = [hit / total if total else float("nan") for hit, total in zip(had, tokens, strict=True)]
    hits.plot(minutes, shares, color=HIT_COLOUR, linewidth=1)
    hits.axhline(statistics.ideal_hit_rate, color="black", linewidth=0.8)
    hits.set_title(f"ideal hit rate, {statistics.ideal_hit_rate:.1%} of all tokens", fontsize=10)
    hits.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    hits.set_ylim(0, 1)
    for axis in (arrivals, hits):
        axis.set_xlabel("minutes")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(visible=True, linewidth=0.3)


def _sums(counts: Sequence[int], step: int) -> list[int]:
    return [sum(counts[i : i + step]) for i in range(0, len(counts), step)]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)
