"""Tables of many runs: each run is kept as it ends, so a table that was cut off goes on where it was.

A cell is one run. What came of it is a line of JSON in a file of its table, under what was run (`of`) and a digest of what
decided there (`decided`). That digest is of a *rehearsal*: a minute of a changing load through the same
setup, whose times to first token hardly any other decisions would give. So a table does not mix the runs of two policies that
happen to have one name, and keeps its cells when code changes that decides as before.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import track

from simulation.policies.arrivals import requests_of
from simulation.policies.outcome import Rows
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.workloads.mixtures import PHASES, phased

REHEARSED = 0.03
"""Of each phase's length: a minute, three windows, 940 requests."""

RUNS_OF_A_PROCESS = 8
"""Memory that a run leaves in pieces goes back with its process."""

Names = Mapping[str, str | int | float]
Found = dict[str, Any]
Item = TypeVar("Item")


class Cell(NamedTuple):
    """One run: what it is called by, its setup, and what makes its figures in whichever process."""

    of: Names
    setup: Setup
    make: Callable[[], Found]


class Kept(NamedTuple):
    """One cell with its figures, which went through JSON."""

    of: Names
    found: Found


def filled(path: Path, cells: Sequence[Cell], jobs: int) -> list[Kept]:
    """Every cell, in order: those that `path` does not have are run, in so many processes, and added to it. Errors: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    setups = {_unseeded(each.setup): each.setup for each in cells}
    with get_context("spawn").Pool(jobs, maxtasksperchild=RUNS_OF_A_PROCESS) as pool:
        rehearsals = pool.imap(rehearsal, setups.values(), chunksize=1)
        decided = dict(zip(setups, _shown(rehearsals, "rehearsals", len(setups)), strict=True))
        keys = [_key(each.of, decided[_unseeded(each.setup)]) for each in cells]
        found = _read(path)
        missing = {key: each for key, each in zip(keys, cells, strict=True) if key not in found}
        found |= _run(path, missing, pool)
    return [Kept(each.of, found[key]) for key, each in zip(keys, cells, strict=True)]


def rehearsal(setup: Setup) -> str:
    """A digest of what the setup makes of the rehearsed load; the seed is always the same."""
    simulation = Simulation(replace(setup, seed=0))
    stretches = [each._replace(seconds=each.seconds * REHEARSED) for each in PHASES]
    simulation.run(requests_of(phased(Random(0), stretches), setup.block_tokens))
    columns = b"".join(simulation.rows.column(name).tobytes() for name in Rows.COLUMNS)
    return blake2b(columns, digest_size=8).hexdigest()


def _run(path: Path, cells: Mapping[str, Cell], pool: Pool) -> dict[str, Found]:
    found = {}
    runs = pool.imap_unordered(_made, cells.items(), chunksize=1)
    with path.open("a") as file:
        for key, figures in _shown(runs, "runs", len(cells)):
            # The end of a line that was cut off comes first, not last.
            file.write("\n" + json.dumps({**json.loads(key), "found": figures}))
            file.flush()
            found[key] = figures
    return found


def _shown(items: Iterable[Item], what: str, total: int) -> Iterable[Item]:
    """With a bar beside the table, which goes to standard output."""
    return track(items, what, total, transient=True, console=Console(stderr=True))


def _made(keyed: tuple[str, Cell]) -> tuple[str, Found]:
    key, cell = keyed
    return key, json.loads(json.dumps(cell.make()))


def _read(path: Path) -> dict[str, Found]:
    """What is there, by key. A line that was cut off is none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[_key(entry["of"], entry["decided"])] = entry["found"]
    return found


def _key(of: Names, decided: str) -> str:
    return json.dumps({"of": of, "decided": decided}, sort_keys=True)


def _unseeded(setup: Setup) -> str:
    return repr(replace(setup, seed=0))
