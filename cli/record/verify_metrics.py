"""What a verification found, as a file that Prometheus' node exporter reads: the process ends, and cannot be asked."""

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from replay.verification import Verification


def write(file: Path, found: Verification, now_ns: int) -> None:
    """All of it, or nothing. Errors: OSError."""
    registry = CollectorRegistry()
    counts = {
        "checked": ("Decisions that were derived again", found.findings.checked.total()),
        "differing": ("Decisions that came out otherwise", found.findings.differing.total()),
        "underivable": ("Decisions that could not be derived", found.findings.skipped.total()),
    }
    for name, (told, count) in counts.items():
        Gauge(f"vertumnus_verify_{name}_decisions", told, registry=registry).set(count)
    last = Gauge("vertumnus_verify_last_sequence", "How far the newest log was verified", registry=registry)
    last.set(found.reached_seq)
    at = Gauge("vertumnus_verify_timestamp_seconds", "When the verification ended", registry=registry)
    at.set(now_ns / 1e9)
    write_to_textfile(str(file), registry)
