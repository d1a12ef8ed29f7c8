"""The controller and the cache manager in virtual time: their deciders, four times a second, and the agents' side of it."""

from collections.abc import Mapping

from services.cachemgr import decider as cachemgr
from services.controller import decider as controller
from services.controller import epochs, forecasting, reconfiguring, replaying, saga
from services.controller.capacity import Capacity, capacity
from services.controller.epochs import Configured
from shared.contracts.commands import Adopt, Drain
from shared.contracts.envelope import Channel, EventData, Stored
from shared.contracts.events import EpochAborted, EpochCommitted
from shared.contracts.ids import NodeId, Source
from shared.model.cost import US_PER_S
from shared.model.parameters import Parameters
from simulation.policies.agenda import Agenda
from simulation.policies.copies import Copies
from simulation.policies.journal import Journal
from simulation.policies.node import Node
from simulation.policies.setup import Setup

TICK_S = 0.25
"""As the services' own."""

CONTROLLER, CACHE_MANAGER = Source("controller"), Source("cachemgr")
ASKED_BY = controller.Asker("simulation", "as set up")

FIXED = {"reconfiguration_policy": "off"}
"""Compositions stay as set up unless a policy is asked for."""


class Control:
    """One leader of each kind, which nobody contests."""

    def __init__(self, setup: Setup, agenda: Agenda, journal: Journal, nodes: Mapping[NodeId, Node]) -> None:
        self._setup = setup
        self._agenda = agenda
        self._journal = journal
        self._nodes = nodes
        self.state = controller.initial()
        asked = {**Parameters().model_dump(), **FIXED, **setup.parameters}
        # A switch is committed when the cache manager has told what the new workers start with.
        managed = setup.cache_manager or asked["cache_policy"] != "lru" or asked["reconfiguration_policy"] != "off"
        self.manager = cachemgr.initial(setup.coefficients) if managed else None
        self._copies = Copies(setup, agenda, nodes)
        self._scan_after_ns = 0
        journal.listen(self._hear)

    def start(self) -> None:
        """Lead, set the parameters, and give every node its first epoch."""
        self._say([controller.take_leadership(self.state, CONTROLLER, 1)])
        if self.manager is not None:
            self._manage([cachemgr.take_leadership(self.manager, CACHE_MANAGER, 1)])
        self._say(controller.change_parameters(self.state, {**FIXED, **self._setup.parameters}, ASKED_BY))
        for node in self._nodes.values():
            node.register()
        default = next(iter(self._setup.nodes.values()))
        configured = Configured(default, self._setup.nodes)
        for wanted in epochs.wanted(self.state, configured, {}):
            if wanted.misfit:
                raise ValueError(f"composition of {wanted.node}: {wanted.misfit}")
            refused = self._nodes[wanted.node].adopt(wanted.adopt(self.state.term))
            assert refused is None, f"a fresh node adopts its first epoch: {refused}"
            self._agenda.step()
            self._say(epochs.commit(self.state, wanted, self._capacity))
        self._agenda.every(TICK_S, self._tick)
        if self.manager is not None:
            self._agenda.every(min(TICK_S, self.manager.parameters.scan_every_s), self._tick_manager)

    # --- ticks

    def _tick(self) -> None:
        if closed := controller.close_window(self.state, self._agenda.now_ns):
            self._say(closed)
            self._say(controller.refit(self.state))
            self._say(reconfiguring.decide(self.state, self._capacity))
            self._forecast()
        for each in tuple(self.state.sagas.open.values()):
            self._say(saga.advance(each, self.state.parameters, self._capacity, self._agenda.now_ns))
            if each.plan.node in self.state.sagas.open:
                self._order(saga.orders(each, self.state.parameters, self.state.term), each.plan.node)

    def _forecast(self) -> None:
        """What the controller has a process of its own for: here the answer takes no time."""
        if (asked := forecasting.ask(self.state, self._setup.coefficients)) is not None:
            self._say(forecasting.made(self.state, asked, replaying.scores(asked.question)))
            self._say(reconfiguring.decide(self.state, self._capacity))

    def _tick_manager(self) -> None:
        assert self.manager is not None, "only a manager that is there ticks"
        self._manage(cachemgr.reconcile_placements(self.manager))
        if self._agenda.now_ns >= self._scan_after_ns:
            self._scan_after_ns = self._agenda.now_ns + round(self.manager.parameters.scan_every_s * 1e9)
            self._manage(cachemgr.scan(self.manager))
        self._manage(cachemgr.settle(self.manager, self._agenda.now_ns, self._copies.told))
        self._copies.carry(cachemgr.orders(self.manager))

    def move(self, move: saga.Move) -> str | None:
        """Plan one reconfiguration, as an operator does; why not, or None."""
        if obstacle := saga.obstacle(self.state.sagas, self.state.pool, self.state.parameters, move):
            return obstacle
        self._say(saga.plan(self.state.sagas, self.state.pool, self.state.parameters, move))
        return None

    def _order(self, order: Drain | Adopt | None, node: NodeId) -> None:
        match order:
            case Drain():
                self._nodes[node].drain(order)
            case Adopt():
                self._nodes[node].adopt(order)
            case None:
                pass

    def _capacity(self, degree: int) -> Capacity:
        window_us = self.state.parameters.window_s * US_PER_S
        return capacity(self._setup.capacities, self._setup.capacity_share, window_us, degree)

    # --- facts

    def _hear(self, stored: Stored) -> None:
        if stored.data.CHANNEL is not Channel.CACHE:
            controller.evolve(self.state, stored)
        if self.manager is not None:
            cachemgr.evolve(self.manager, stored)
        if stored.data.CHANNEL is Channel.CONTROL:
            for node in self._nodes.values():
                node.learn(stored)

    def _say(self, facts: list[EventData]) -> None:
        self._journal.say(CONTROLLER, facts)
        for fact in facts:
            match fact:
                case EpochCommitted():
                    self._nodes[fact.node].committed()
                case EpochAborted():
                    self._nodes[fact.node].call_off()
                case _:
                    pass

    def _manage(self, facts: list[EventData]) -> None:
        self._journal.say(CACHE_MANAGER, facts)
