"""Which decisions are derived by which of several processes that verify one record. Pure but for the number of processors.

Decisions are parted by who made them, because the states of routers and of leaders have nothing in common: routers, the cache
manager, the controller; and with more processes than that the routers once more. What the recorded inputs give needs no state,
and goes where there is time for it. Nothing is parted by time, so every state is folded as one process folds it.
"""

import os
from typing import NamedTuple
from zlib import crc32

from shared.contracts.events import LeadershipTaken
from shared.contracts.ids import Source

JOBS_OF_ITSELF = 3
"""Without being asked: one for each kind of decider."""

WORTH_EVENTS = 50_000
"""A process takes a second to start, in which one folds some ten thousand events."""


class Part(NamedTuple):
    """Which decisions: of the routers whose number in `of` is `routers` (None for no router), and of which leaders."""

    routers: int | None = 0
    of: int = 1
    controller: bool = True
    cache_manager: bool = True
    inputs: bool = True
    """Whether placements are checked with their recorded inputs, too."""

    def leads(self, kind: str) -> bool:
        """Whether the decisions of the leaders belong to it whose terms begin with an event of type `kind`."""
        return self.controller if kind == LeadershipTaken.TYPE else self.cache_manager

    def has(self, router: Source) -> bool:
        """Whether the decisions of this router process belong to the part."""
        return self.routers is not None and _number(router, self.of) == self.routers


def _number(name: str, of: int) -> int:
    """One in `of`, the same in every process."""
    return crc32(name.encode()) % of if of > 1 else 0


WHOLE = Part()


def parts(jobs: int) -> list[Part]:
    """As many parts as there are jobs; each decision lies in exactly one."""
    if jobs == 1:
        return [WHOLE]
    if jobs == 2:
        # Each of the two takes about as long as the other, at two scans to a placement or less.
        return [Part(cache_manager=False, inputs=False), Part(routers=None, controller=False)]
    controller = Part(routers=None, cache_manager=False)
    manager = Part(routers=None, controller=False, inputs=False)
    routers = [Part(number, jobs - 2, False, False, False) for number in range(jobs - 2)]
    return [*routers, manager, controller]


def jobs_for(events: int) -> int:
    """How many processes a record of that size is worth, on this machine."""
    return 1 if events < WORTH_EVENTS else max(1, min(JOBS_OF_ITSELF, len(os.sched_getaffinity(0))))
