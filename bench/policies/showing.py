"""Tables and documents of the benches."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from simulation.policies.studies import Spread


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as the documentation has it."""
    for row in (head, ["---"] * len(head), *rows):
        print("|", " | ".join(row), "|")


def share(found: Spread) -> str:
    """A change over several runs."""
    return f"{found.mean:+.1%} ±{100 * found.sd:.1f}"


def document(folder: Path | None, name: str, content: Any) -> None:
    """The figures as JSON, if there is a folder for them. Errors: OSError."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))


def conditions() -> str:
    """What a reader of seconds of ours needs to know."""
    load = os.getloadavg()[0]
    return f"load {load:.1f} on {os.cpu_count()} processors"
