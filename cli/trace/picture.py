"""Statistics and reports for a terminal: tables, and bars in proportion to the shares they stand for."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.trace.measuring import Report, Times
from simulation.workloads.statistics import COUNT_S, LONG_TOKENS, Lengths, Statistics

BAR_WIDTH = 20
SPARK_WIDTH = 72
_SPARKS = " ▁▂▃▄▅▆▇█"


def statistics_picture(name: str, statistics: Statistics) -> RenderableType:
    """A trace at a glance."""
    return Group(_figures(name, statistics), _length_bars(statistics), _arrivals(statistics))


def report_picture(report: Report) -> RenderableType:
    """A run at a glance: counts, then times."""
    counts = _plain_table("run")
    counts.add_row("requests", f"{report.requests:,} in {report.seconds:.1f} s, {report.requests_per_s:.2f}/s")
    counts.add_row("answered, refused, failed", f"{report.ok:,}, {report.refused:,}, {report.failed:,}")
    counts.add_row("tokens in, out", f"{report.prompt_tokens:,}, {report.output_tokens:,}")
    counts.add_row("cached share of tokens in", f"{report.cached_share:.1%}")
    if report.attainment_by_tokens is not None and report.attainment_by_requests is not None:
        both = f"{report.attainment_by_tokens:.1%}, {report.attainment_by_requests:.1%}"
        counts.add_row("SLO attainment by tokens, by requests", both)
    for kind, problem in report.problems.items():
        counts.add_row(Text(kind, "red"), Text(f"{problem.requests:,}: {problem.example}"))
    times = Table("seconds", "mean", "P50", "P90", "P99", "max", title_justify="left")
    for column in times.columns[1:]:
        column.justify = "right"
    _add_times(times, "TTFT from the planned instant", report.ttft_s)
    _add_times(times, "TTFT from sending", report.ttft_from_sending_s)
    _add_times(times, "time per output token", report.tpot_s)
    _add_times(times, "sent late by", report.late_s)
    return Group(counts, times)


def _figures(name: str, statistics: Statistics) -> Table:
    table = _plain_table(name)
    span = f"{statistics.requests:,} in {statistics.seconds:,.0f} s, {statistics.requests_per_s:.2f}/s"
    table.add_row("requests", span)
    table.add_row("prompt tokens", _lengths(statistics.prompt_tokens))
    table.add_row("output tokens", _lengths(statistics.output_tokens))
    long = f"{statistics.long_requests_share:.1%} of requests, {statistics.long_tokens_share:.1%} of tokens"
    table.add_row(f"longer than {LONG_TOKENS // 1024}K", long)
    table.add_row("ideal hit rate", f"{statistics.ideal_hit_rate:.1%} of tokens (one endless cache)")
    table.add_row("share more than all do", f"{statistics.shared_requests_share:.1%} of requests")
    table.add_row("distinct blocks", f"{statistics.blocks:,} of {statistics.block_tokens} tokens")
    table.add_row("burstiness", f"{statistics.burstiness:.2f} (variance/mean per {COUNT_S} s; Poisson 1)")
    if statistics.arrival_grid_ms:
        table.add_row(
            "arrivals", f"rounded to {statistics.arrival_grid_ms / 1000:g} s; `send` and `convert` spread them"
        )
    return table


def _length_bars(statistics: Statistics) -> Table:
    table = Table("prompt tokens from", "requests", "", "tokens", "", box=None, pad_edge=False, collapse_padding=True)
    tokens = sum(length_bin.tokens for length_bin in statistics.length_bins)
    most = max(max(b.requests / statistics.requests, b.tokens / tokens) for b in statistics.length_bins)
    for length_bin in statistics.length_bins:
        of_requests, of_tokens = length_bin.requests / statistics.requests, length_bin.tokens / tokens
        table.add_row(
            f"{length_bin.tokens_from:,}",
            f"{of_requests:.1%}",
            Text("█" * round(BAR_WIDTH * of_requests / most), "cyan"),
            f"{of_tokens:.1%}",
            Text("█" * round(BAR_WIDTH * of_tokens / most), "magenta"),
        )
    for column in (0, 1, 3):
        table.columns[column].justify = "right"
    return table


def _arrivals(statistics: Statistics) -> Text:
    """Requests over time, one character for an equal part of it."""
    buckets = _merged(statistics.arrivals, SPARK_WIDTH)
    most = max(buckets)
    line = "".join(_SPARKS[-(-(len(_SPARKS) - 1) * bucket // most)] for bucket in buckets)
    return Text.assemble("arrivals ", (line, "green"))


def _merged(counts: Sequence[int], width: int) -> list[int]:
    step = -(-len(counts) // width)
    return [sum(counts[i : i + step]) for i in range(0, len(counts), step)]


def _lengths(lengths: Lengths) -> str:
    return (
        f"mean {lengths.mean:,.0f}, P50 {lengths.p50:,.0f}, P90 {lengths.p90:,.0f}, "
        f"P99 {lengths.p99:,.0f}, max {lengths.max:,}"
    )


def _plain_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    return table


def _add_times(table: Table, name: str, times: Times | None) -> None:
    if times is not None:
        table.add_row(name, *(f"{seconds:.3f}" for seconds in times))
