"""Events as lines for people and for programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson

VALUE_CHARS_MAX = 40
"""Longer values (block ids, candidates) are told by their size; `events get` shows them."""


def json_line(seq: int, raw: bytes) -> str:
    """The published event with its sequence; bytes that are no JSON as text, with what cannot be read replaced."""
    try:
        return orjson.dumps({"stream_seq": seq, **orjson.loads(raw)}).decode()
    except (orjson.JSONDecodeError, TypeError):
        return orjson.dumps({"stream_seq": seq, "unreadable": raw.decode(errors="replace")}).decode()


def line(seq: int, raw: bytes) -> str:
    """One line: sequence, time (UTC), type, source, and the short values of what it says."""
    try:
        return line_of({"stream_seq": seq, **orjson.loads(raw)})
    except (orjson.JSONDecodeError, TypeError):
        return f"{seq:>9}  {len(raw)} bytes that are no event"


def line_of(event: dict[str, Any]) -> str:
    """The line of an event with its `stream_seq`."""
    data = event.get("data")
    if not isinstance(data, dict):
        return f"{event['stream_seq']:>9}  {event.get('type', 'no event')}"
    time = datetime.fromtimestamp(event["time_ns"] / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return f"{event['stream_seq']:>9}  {time}  {event['type']:<24} {event['source']:<24} {values(data)}"


def values(data: dict[str, Any]) -> str:
    """What an event says, in one line; what is empty is left out."""
    return " ".join(f"{name}={_short(value)}" for name, value in data.items() if value not in (None, "", [], {}))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """Show how many `what` there were so far, on standard error while it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed:,}"), TextColumn(what), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda number: shown.update(task, completed=number)


def _short(value: Any) -> str:
    if isinstance(value, list) and not all(isinstance(each, int | str) for each in value):
        return f"[{len(value)}]"
    text = orjson.dumps(value).decode() if isinstance(value, list | dict) else str(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"<{len(text)} characters>"
