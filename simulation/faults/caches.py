"""`python -m simulation.faults.caches`: pools whose caches change a hundred thousand times, while their cache managers, agents
and the log's server come and go.

A pool's story has chapters. In each a few dozen requests share prefixes that are hot for three chapters, compositions change,
policies copy and reclaim by thresholds that so few requests reach, and up to three faults befall the pool. Then it heals, and
every projection of the caches must be the union of what the workers' own indexes say. At the end everything must hold that
holds at the end of any run, verification of every decision included.
"""

from collections.abc import Iterator, Sequence
from random import Random
from time import perf_counter
from typing import Annotated
from unittest.mock import patch

import typer

from services.cachemgr import trie
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    EpochCommitted,
    NodeRegistered,
    ReclamationRequested,
    ReplicationRequested,
)
from simulation.faults.operating import CHANGES
from simulation.faults.running import Verdict, judge
from simulation.faults.scenario import Ask, Fault, FaultKind, Request, Scenario, Shape

OPERATIONS = (
    BlocksStored, BlocksEvicted, CacheReported, ReplicationRequested, ReclamationRequested, EpochCommitted, NodeRegistered,
)  # fmt: skip
"""What is counted: whatever changes a cache or what is known of it, and what asks for that."""

SHAPE = Shape(
    routers=2,
    standbys=True,
    compositions=((1, 1, 2), (2, 2)),
    decode_ranks=0,
    blocks_per_rank=12,
    queue_max=8,
    skews_ms=50,
    older=True,
)
"""Caches so small that every chapter evicts; policies are the chapters' own."""

FAULTS: tuple[tuple[FaultKind, tuple[str, ...]], ...] = (
    ("kill", ("cachemgr-a", "cachemgr-b")),
    ("kill", ("worker-n0", "worker-n1")),
    ("engine-death", ("worker-n0", "worker-n1")),
    ("cut", ("cachemgr-a", "cachemgr-b", "worker-n0", "worker-n1")),
    ("outage", ("",)),
    ("loss", ("",)),
)
"""An outage is the log's server, gone for everybody."""

HOLDERLESS_MAX = 300
"""Nodes of a trie that nobody holds: what two chapters leave behind, so that in this story tries forget as well."""

CHAPTER_S = 8.0
HOT_CHAPTERS = 3


def chapter(seed: int, number: int) -> Scenario:
    """What happens between two points of rest."""
    chance = Random(f"caches {seed} {number}")
    times = sorted(round(chance.uniform(0.2, CHAPTER_S), 3) for _ in range(chance.randint(20, 60)))
    asks = [Ask(0.1, "parameters", 0, (chance.choice((2, 4, 5)) + 0.5) / len(CHANGES))]
    for _ in range(chance.randint(0, 2)):
        at_s = round(chance.uniform(1, CHAPTER_S), 3)
        asks.append(Ask(at_s, "reconfigure", chance.randrange(len(SHAPE.nodes)), round(chance.random(), 6)))
    return Scenario(
        seed=seed,
        shape=SHAPE,
        requests=tuple(_request(chance, at_s, number) for at_s in times),
        asks=tuple(sorted(asks)),
        faults=tuple(sorted(_fault(chance) for _ in range(chance.randint(0, 3)))),
        checks_every=400,
    )


def _request(chance: Random, at_s: float, number: int) -> Request:
    first = number // HOT_CHAPTERS * 3
    documents = tuple(first + min(chance.randint(0, 3), 2) for _ in range(chance.randint(0, 3)))
    return Request(at_s, documents, chance.randint(1, 60), max_tokens=1, router=chance.random())


def _fault(chance: Random) -> Fault:
    kind, targets = chance.choice(FAULTS)
    at_s, lasts_s = chance.uniform(1, CHAPTER_S), chance.uniform(0.5, 6)
    return Fault(round(at_s, 3), kind, chance.choice(targets), round(lasts_s, 3), 0.2 if kind == "loss" else 0.0)


class Counting:
    """A story that goes on until so many operations are in the log. `rests` counts the points of rest."""

    def __init__(self, seed: int, operations: int) -> None:
        self.operations, self.rests = 0, 0
        self._seed, self._wanted, self._counted = seed, operations, 0

    def goes_on(self, events: Sequence[Stored]) -> Scenario | None:
        """The next chapter."""
        self.rests += 1
        self.operations += sum(isinstance(events[at].data, OPERATIONS) for at in range(self._counted, len(events)))
        self._counted = len(events)
        return chapter(self._seed, self.rests) if self.operations < self._wanted else None


def tell(seed: int, operations: int) -> tuple[Verdict, Counting]:
    """The story of a seed, and what became of it."""
    counting = Counting(seed, operations)
    with patch.object(trie, "HOLDERLESS_MAX", HOLDERLESS_MAX):
        return judge(chapter(seed, 0), counting.goes_on), counting


def main(
    operations: Annotated[
        int, typer.Option(min=1, help="events that change caches, or ask for it, at least, of all stories together")
    ] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="of the first story; each further one has the next")] = 0,
    stories: Annotated[int, typer.Option(min=1, help="of equal length, one after the other")] = 25,
) -> None:
    """Tell stories of seeds; the code is 1 if something that must hold did not. A service that comes back folds its story from
    the beginning, so many short ones take less time than a long one."""
    clean, told = True, 0
    for number in range(seed, seed + stories):
        began_s = perf_counter()
        verdict, counting = tell(number, -(-operations // stories))
        for line in _lines(verdict, counting, perf_counter() - began_s):
            typer.echo(line)
        clean, told = clean and verdict.clean, told + counting.operations
    typer.echo(f"{told:,} operations in {stories} stories: {'clean' if clean else 'NOT CLEAN'}")
    raise typer.Exit(code=0 if clean else 1)


def _lines(verdict: Verdict, counting: Counting, took_s: float) -> Iterator[str]:
    yield from (f"violated {rule}" for rule in verdict.violations)
    yield (
        f"seed {verdict.seed}: {counting.operations:,} operations, {counting.rests} points of rest, {verdict.events:,} events, "
        f"{verdict.verified:,} decisions verified, {verdict.virtual_s:,.0f} s in {took_s:,.0f} s"
    )
    yield "  " + ", ".join(f"{name} {count:,}" for name, count in verdict.types.most_common())


if __name__ == "__main__":
    typer.run(main)
