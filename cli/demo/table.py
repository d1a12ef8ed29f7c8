"""The demo's last word: one table, what to make of it, and the same as JSON."""

from typing import Any

from rich.table import Table

from cli.demo.running import Ran
from cli.trace.measuring import Times
from shared.contracts.events.cache_control import ReplicaInstalled
from shared.contracts.events.control import ReconfigurationPlanned

LATE_SHARE = 0.1
"""From this share of the mean TTFT on, the client's own lateness is worth a word."""

Figures = dict[str, Any]


def figures(ran: Ran) -> Figures:
    """What is told of one half. Times are in the seconds of the system that the half stands for."""
    report, record = ran.report, ran.audit
    return {
        "requests": report.requests,
        "answered": report.ok,
        "refused": report.refused,
        "failed": report.failed,
        "problems": {kind: problem._asdict() for kind, problem in report.problems.items()},
        "ttft_s": _times(report.ttft_s, ran.half.speedup),
        "tpot_s": _times(report.tpot_s, ran.half.speedup),
        "late_s": _times(report.late_s, ran.half.speedup),
        "slo_attainment_by_tokens": report.attainment_by_tokens,
        "cached_share": report.cached_share,
        "events": record.events,
        "audit_violations": record.violation_count,
        "violations": record.violations[:3],
        "ends": dict(record.by_end),
        "reconfigurations": record.by_type[ReconfigurationPlanned.TYPE],
        "replications": record.by_type[ReplicaInstalled.TYPE],
        "moved": [each._asdict() for each in ran.moved],
        "transformers": None if ran.verdict is None else dict(ran.verdict),
    }


def passed(figures: Figures) -> bool:
    """Whether a half did what it must: all answered or refused by admission, every token right, the record whole."""
    exact = figures["transformers"] is None or not figures["transformers"]["mismatches"]
    return bool(figures["answered"] and not figures["failed"] and exact and not figures["audit_violations"])


def table(told: dict[str, Figures]) -> Table:
    """One column per half."""
    halves = list(told.values())
    shown = Table("", *told, title="Vertumnus", title_justify="left")
    for column in shown.columns[1:]:
        column.justify = "right"
    shown.add_row("requests answered", *(f"{each['answered']:,} of {each['requests']:,}" for each in halves))
    for part in ("mean", "p50", "p90", "p99"):
        shown.add_row(f"TTFT {part.replace('p', 'P')}, s", *(_seconds(each["ttft_s"], part) for each in halves))
    shown.add_row("SLO attainment by tokens", *(_share(each["slo_attainment_by_tokens"]) for each in halves))
    shown.add_row("cached share of prompt tokens", *(_share(each["cached_share"]) for each in halves))
    shown.add_row("reconfigurations, replications", *_counts(halves))
    shown.add_row("split and merge: drains, s", *(_moved(each["moved"], "drain_s", 2) for each in halves))
    shown.add_row("split and merge: switches, s", *(_moved(each["moved"], "switch_s", 3) for each in halves))
    shown.add_row("tokens as transformers chooses", *(_verdict(each["transformers"]) for each in halves))
    shown.add_row("events on record", *(f"{each['events']:,}" for each in halves))
    shown.add_row("audit of the record", *(_audit(each["audit_violations"]) for each in halves))
    return shown


def remarks(told: dict[str, Figures]) -> list[str]:
    """What went wrong, and what the times hold that is not the system's."""
    said = []
    for name, each in told.items():
        for kind, problem in each["problems"].items():
            said.append(f"{name}: {problem['requests']:,} × {kind}: {problem['example']}")
        said += [f"{name}: {violation}" for violation in each["violations"]]
        aborted = [move["why_not"] for move in each["moved"] if move["why_not"]]
        said += [f"{name}: a reconfiguration was aborted: {why}" for why in aborted]
        ttft, late = each["ttft_s"], each["late_s"]
        if ttft and late and late["mean"] > LATE_SHARE * ttft["mean"]:
            said.append(
                f"{name}: this machine could not send the requests in time (on average {late['mean']:.2f} s late, "
                f"which TTFT includes)"
            )
    return said


def _times(times: Times | None, speedup: float) -> dict[str, float] | None:
    return {name: value * speedup for name, value in times._asdict().items()} if times else None


def _seconds(times: dict[str, float] | None, part: str) -> str:
    return f"{times[part]:.2f}" if times else "–"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _counts(halves: list[Figures]) -> list[str]:
    return [f"{each['reconfigurations']}, {each['replications']}" for each in halves]


def _moved(moved: list[dict[str, Any]], what: str, digits: int) -> str:
    return ", ".join(f"{each[what]:.{digits}f}" for each in moved if not each["why_not"]) or "none"


def _verdict(verdict: dict[str, int] | None) -> str:
    if verdict is None:
        return "no tensors"
    undecided = f", {verdict['within_gap']} undecided" if verdict["within_gap"] else ""
    return f"{verdict['equal']:,} of {verdict['positions']:,}{undecided}"


def _audit(violations: int) -> str:
    return "clean" if not violations else f"{violations} violations"
