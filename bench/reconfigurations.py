"""Splits and merges of a real node under continuous load: `python -m bench.reconfigurations MODEL_DIR`.

The real half of the demo, made longer: NATS, Postgres, every service, SmolLM2 on eight CPU ranks, and requests all the time.
Meanwhile an operator asks for one random split or merge after the other. Every greedy answer is compared with transformers
afterwards, so an output that any of them changed would show. What is printed: how requests and reconfigurations ended, and how
long drains and switches took. Exit status 1 if a request failed, a token is wrong, the record is not whole or nothing moved.
"""

import random
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from cli.demo.halves import real
from cli.demo.playing import play
from cli.demo.table import figures, passed, table
from cli.embedded.data_dir import DataDir
from shared.model.lattice import DEGREES, Composition, merges, splits

REQUESTS_BETWEEN = 6
"""Answered between two reconfigurations; as many come in the time of a drain."""


def main(
    model_dir: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    reconfigurations: Annotated[int, typer.Option(min=1, max=1_000)] = 50,
    seed: int = 1,
) -> None:
    """Reconfigure a serving node so many times."""
    half = real(model_dir)
    moves = wanderings(half.choices.composition, reconfigurations, random.Random(seed))
    half = half._replace(requests=REQUESTS_BETWEEN * (len(moves) + 1), moves=moves)
    with tempfile.TemporaryDirectory(prefix="vertumnus-bench-") as directory:
        Path(directory).chmod(0o711)  # Postgres has a user of its own
        home = DataDir(Path(directory) / "data")
        ran = play(half, None, home, Console(stderr=True, soft_wrap=True), threading.Event())
    told = figures(ran)
    # Behind an aborted one the next may ask for what the node has, and then nothing moves.
    committed = [each for each in ran.moved if each.why_not is None and each.switch_s]
    print(f"{len(committed)} of {len(ran.moved)} reconfigurations committed")
    for why in sorted({each.why_not for each in ran.moved if each.why_not}):
        print(f"aborted: {why}")
    if not committed:
        raise typer.Exit(1)
    for name, seconds in (("drain", [e.drain_s for e in committed]), ("switch", [e.switch_s for e in committed])):
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
        print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {max(seconds) * 1e3:.1f} ms")
    Console().print(table({half.name: told}))
    if not passed(told):
        raise typer.Exit(1)


def wanderings(composition: Composition, steps: int, chance: random.Random) -> tuple[Composition, ...]:
    """One split or merge after the other, whichever there are with equal chances."""
    found = []
    for _ in range(steps):
        composition = chance.choice([*splits(composition, DEGREES), *merges(composition, DEGREES)])
        found.append(composition)
    return tuple(found)


if __name__ == "__main__":
    typer.run(main)
