"""Who decides for the routers of a simulation: their own decider, or another system's rule in its place."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple, Protocol

from services.router import decider
from services.router.decider import Arrival, Moment, State
from shared.contracts.envelope import EventData, Stored
from shared.contracts.ids import RequestId, RouterId, Source
from simulation.baselines.placing import Placing
from simulation.baselines.rules import RULES
from simulation.policies.agenda import Agenda
from simulation.policies.journal import Journal, View
from simulation.policies.setup import Setup


class Deciding(Protocol):
    """What `services.router.decider` is to its shell."""

    def evolve(self, state: State, stored: Stored) -> None: ...

    def receive(self, state: State, arrival: Arrival, moment: Moment) -> list[EventData]: ...

    def assign_again(
        self, state: State, request: RequestId, generated_tokens: int, moment: Moment
    ) -> list[EventData]: ...


class Router(NamedTuple):
    """One process: its name, what it knows, and how it decides."""

    id: RouterId
    source: Source
    view: View
    deciding: Deciding


def routers_of(setup: Setup, agenda: Agenda, journal: Journal) -> Iterator[Router]:
    """With views of age 0 all know the same, so they share one state; else each has its own."""
    names = [f"r{index}" for index in range(setup.routers)]
    together = not setup.view_age_s
    known: tuple[View, Deciding] | None = None
    for name in names:
        if known is None or not together:
            deciding: Deciding = Placing(RULES[setup.rule](Random(f"{setup.seed} {name}"))) if setup.rule else decider
            owners = frozenset(map(Source, names if together else [name]))
            view = View(agenda, decider.initial(setup.coefficients), deciding.evolve, owners, setup.view_age_s)
            journal.listen(view.tell)
            known = view, deciding
        yield Router(RouterId(name), Source(name), *known)
