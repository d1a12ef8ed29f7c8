"""A scenario's verdict, and the command that gives it again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog
from structlog.types import EventDict, WrappedLogger

from simulation.faults.scenario import Scenario, Story
from simulation.faults.world import World
from simulation.loop import run


class Verdict(NamedTuple):
    """What became of a scenario. `digest` is of the whole log; `verified` counts decisions that came out again."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    events: int
    verified: int
    virtual_s: float
    outcomes: Counter[str]
    types: Counter[str]

    @property
    def clean(self) -> bool:
        return not self.violations


def judge(scenario: Scenario, goes_on: Story = lambda _: None) -> Verdict:
    """Run it, and what it goes on with. The same scenario gives the same verdict, digest and all, in any process."""
    worlds: list[World] = []

    async def one_run() -> float:
        worlds.append(World(scenario, goes_on))
        await worlds[0].run()
        return asyncio.get_running_loop().time()

    with _heard(worlds):
        virtual_s = run(one_run(), lambda: worlds[0].settled() if worlds else None)
    world = worlds[0]
    return Verdict(
        seed=scenario.seed,
        violations=tuple(world.violations),
        digest=world.digest,
        events=len(world.scene.checker.events),
        verified=world.scene.verified,
        virtual_s=virtual_s,
        outcomes=Counter(each.outcome for each in world.scene.clients),
        types=Counter(stored.event.type for stored in world.scene.checker.events),
    )


@contextmanager
def _heard(worlds: list[World]) -> Iterator[None]:
    """While the block runs, what services log goes to their world and nowhere else."""

    def hear(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        if worlds:
            worlds[0].told(str(event["event"]))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[hear], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


class Parts(NamedTuple):
    """Which parts of a scenario are kept, by their numbers; None for all."""

    faults: tuple[int, ...] | None = None
    requests: tuple[int, ...] | None = None
    asks: tuple[int, ...] | None = None

    def of(self, scenario: Scenario) -> Scenario:
        return scenario.only(*self)

    def command(self, seed: int) -> str:
        """What gives the verdict again."""
        named = zip(("--faults", "--requests", "--asks"), self, strict=True)
        options = "".join(f" {name} {_numbers(which)}" for name, which in named if which is not None)
        return f"python -m simulation.faults --seeds {seed}{options}"


def _numbers(which: tuple[int, ...]) -> str:
    return ",".join(map(str, which)) or "none"
