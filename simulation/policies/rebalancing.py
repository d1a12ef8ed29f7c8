"""Queued requests that go to workers with nothing to do, when routers hear what makes that worth while."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from services.router import stealing
from services.router.stealing import Move
from shared.contracts.envelope import Stored
from shared.contracts.events import PrefillStarted, RequestAssigned
from shared.model.pool import Worker
from simulation.policies.agenda import Agenda
from simulation.policies.deciding import Router


class Rebalancing:
    """What `services.router.rebalancing` does for each of `routers`, whose views are `view_age_s` old. `release` takes a
    request back from its queue, and then it is placed anew."""

    def __init__(
        self, routers: Sequence[Router], agenda: Agenda, view_age_s: float, release: Callable[[Move], None]
    ) -> None:
        self._routers, self._agenda, self._view_age_s, self._release = routers, agenda, view_age_s, release

    def ended(self) -> None:
        """A worker has ended a prefill."""
        if self._view_age_s:
            self._agenda.after(self._view_age_s, self._look)
        else:
            self._look()

    def hear(self, stored: Stored) -> None:
        """An event is on its way to the routers. Where all of them know everything at once, nobody is surprised by it."""
        if self._view_age_s and isinstance(stored.data, (RequestAssigned, PrefillStarted)):
            self._agenda.after(self._view_age_s, partial(self._heard, stored))

    def _look(self) -> None:
        for router in self._routers:
            if stealing.steals((state := router.view.look()).parameters):
                self._move_to(router, stealing.idle_workers(state))

    def _heard(self, stored: Stored) -> None:
        for router in self._routers:
            if stealing.is_crowded(state := router.view.look(), router.source, stored):
                self._move_to(router, stealing.of_each_degree(stealing.idle_workers(state)))

    def _move_to(self, router: Router, idle: Iterable[Worker]) -> None:
        state = router.view.look()
        for worker in idle:
            move = stealing.best_move(state, router.source, worker, self._agenda.now_ns, ())
            if move is not None:
                self._release(move)
