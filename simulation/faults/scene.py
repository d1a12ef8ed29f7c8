"""What a run is made of, for those who look at it and those who ask something of it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from simulation.faults.checkers import LogChecker
from simulation.faults.clients import Client
from simulation.faults.place import Place
from simulation.faults.process import Outside
from simulation.faults.record import Tables
from simulation.faults.scenario import Scenario

H = TypeVar("H")


@dataclass(slots=True)
class Scene:
    """`places` hold the pool's processes by role; `verified` counts decisions that came out again at rest."""

    scenario: Scenario
    outside: Outside
    places: dict[str, Place]
    checker: LogChecker
    record: Tables
    clients: list[Client]
    verified: int = 0

    def hosted(self, kind: type[H]) -> Iterator[tuple[Place, H]]:
        """The living services of one kind, as their `host` gave them."""
        for place in self.places.values():
            if place.service is not None and place.lives and isinstance(place.service.hosted, kind):
                yield place, place.service.hosted

    def has_died(self, source: str) -> bool:
        """Whether the process with this source is gone."""
        return all(place.process is None or place.process.source != source for place in self.places.values())


async def within_life(place: Place, work: "asyncio.Task[object]") -> bool:
    """Whether `work` of the place's process came to its end before that did."""
    assert place.process is not None, "work is done by a process"
    died = asyncio.ensure_future(place.process.died.wait())
    try:
        await asyncio.wait([work, died], return_when=asyncio.FIRST_COMPLETED)
    finally:
        died.cancel()
    return work.done()
