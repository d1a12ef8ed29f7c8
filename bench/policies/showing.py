"""Tables and documents of the benches."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cli.terminal import output
from simulation.policies.outcome import Outcome
from simulation.policies.studies import Spread, changes, figures

NAMES = {"mean_s": "mean", "p90_s": "P90", "long_mean_s": "long", "attainment": "SLO tokens", "hit_rate": "hit rate",
         "utilisation": "busy"}  # fmt: skip
SHARES = {"attainment", "hit_rate", "utilisation"}


def table(title: str, first: str, outcomes: Mapping[str, Sequence[Outcome]], base: str) -> None:
    """One line each: figures with their spread over slices or seeds, and the change of mean and P90 against `base`."""
    shown = Table(first, *NAMES.values(), "mean, change", "P90, change", title=title, title_justify="left")
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, found in outcomes.items():
        numbers = figures(found)
        cells = [_cell(figure, numbers[figure]) if figure in numbers else "-" for figure in NAMES]
        against = [share(changes(found, outcomes[base], figure)) for figure in ("mean_s", "p90_s")]
        shown.add_row(name, *cells, *(["", ""] if name == base else against))
    output().print(shown)


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


def _cell(figure: str, found: Spread) -> str:
    if figure in SHARES:
        return f"{found.mean:.1%}"
    return f"{found.mean:.3f} ±{found.sd:.3f}"
