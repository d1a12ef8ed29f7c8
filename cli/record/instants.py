"""Places in the record as people name them: a sequence, or a time."""

from datetime import UTC, datetime

from replay.instants import Instant
from replay.verifying import EVERYTHING, SEQ_MAX, Span


def instant(name: str, text: str) -> Instant:
    """What `text` names. ValueError names the option and what it takes.

    A time without a zone is UTC; what is left out of it is its beginning.
    """
    if text.isascii() and text.isdigit() and int(text) <= SEQ_MAX:
        return Instant(int(text), True)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name}: {text!r} is neither a sequence nor a time such as 2026-11-30T03:12:07.5 (UTC)"
        ) from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    whole = time.replace(microsecond=0)
    return Instant(int(whole.timestamp()) * 10**9 + time.microsecond * 1_000, False)


def span(first: str | None, last: str | None) -> Span:
    """The range of `--from` and `--to`, either of which may be left out. ValueError names the option."""
    found = EVERYTHING
    if first is not None:
        begin = instant("--from", first)
        found = found._replace(**{"from_seq" if begin.is_seq else "from_ns": begin.number})
    if last is not None:
        end = instant("--to", last)
        found = found._replace(**{"to_seq" if end.is_seq else "to_ns": end.number})
    if found.from_seq > found.to_seq or found.from_ns > found.to_ns:
        raise ValueError(f"--from {first} lies behind --to {last}")
    return found
