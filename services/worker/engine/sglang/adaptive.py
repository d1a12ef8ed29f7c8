"""How one server with the Vertumnus plug-in comes to serve a composition, and loses single pages: by the plug-in's verbs.

A switch is SGLang's own matter once it is asked for: the plug-in holds work, votes, switches and lets go (`verbs`). What is
left here is to ask, to find out what came of it, and to wait until the units' caches are known again.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from services.worker.engine.protocol import EngineDied, EngineError, RankAdopted, RolledBack
from services.worker.engine.sglang.fleet import Fleet, runs
from services.worker.engine.sglang.page_hashes import PageHash
from services.worker.engine.sglang.plugin.wire import EVICT_BLOCKS_MAX
from services.worker.engine.sglang.settings import SglangSettings
from services.worker.engine.sglang.verbs import Limits, Switched, Unreachable, Verbs, switch
from shared.model.lattice import Composition, Group, groups_of
from shared.runtime.clock import Clock

LEASE_SLACK_S = 2.0
"""Beyond what a switch may take: for how long a server holds work for an agent that has died."""

RESYNC_LIMIT_S = 5.0
"""For the events of a merge, which the plug-in publishes with it."""

LOCAL = ("127.0.0.1", "localhost", "::1")


class AdaptiveGeometry:
    """One server with the plug-in. `changed` is set whenever KV events have come."""

    def __init__(self, fleet: Fleet, settings: SglangSettings, clock: Clock, changed: asyncio.Condition) -> None:
        self._fleet, self._settings, self._clock, self._changed = fleet, settings, clock, changed
        self._limits = Limits(settings.drain_s, settings.vote_s, settings.drain_s + settings.vote_s + LEASE_SLACK_S)
        self._verbs = Verbs(fleet.servers[0].http, settings.prefill_ranks)
        self._composition: Composition = ()
        self._epoch = 0
        self._logger = structlog.get_logger(component="sglang-geometry")

    async def start(self) -> None:
        """Find out what the server serves. Errors: EngineDied if it has no plug-in, or its units disagree."""
        try:
            states = await self._verbs.states()
            self._composition = await self._verbs.composition()
        except Unreachable as error:
            raise EngineDied(f"{self._fleet.servers[0].url}: {error}") from error
        self._epoch = max(state.epoch for state in states)
        pids = [state.pid for state in states]
        # In another container of the same pod it is local too, but its processes have other numbers there.
        if self._settings.servers[0].host in LOCAL and all(map(runs, pids)):
            self._fleet.watch_processes(self._fleet.servers[0], pids)

    async def adopt(self, composition: Composition) -> tuple[RankAdopted, ...]:
        """Errors: RolledBack if units would not; EngineDied if the server does not say what became of it."""
        seconds = 0.0
        if composition != self._composition:
            seconds = await self._switch(composition)
        return tuple(RankAdopted(rank, seconds) for rank in range(self._settings.prefill_ranks))

    async def _switch(self, composition: Composition) -> float:
        self._epoch += 1
        old = [set(group.ranks) for group in groups_of(self._composition)]
        # A group inside an old one keeps what it has without a word; a wider one keeps what its units share, and tells it.
        wider = [
            self._fleet.units[group.first_rank]
            for group in groups_of(composition)
            if not any(ranks.issuperset(group.ranks) for ranks in old)
        ]
        before = [unit.clears for unit in wider]
        try:
            made = await switch(self._verbs, self._epoch, composition, self._limits, self._clock)
        except Unreachable as error:
            reason = f"{self._fleet.servers[0].url}: {error}"
            self._fleet.lose(reason)
            raise EngineDied(reason) from error
        expected = composition if made.made else self._composition
        if made.composition != expected:
            # Two nodes whose settings name one server, say. What the pool believes of this one is void.
            reason = f"{self._fleet.servers[0].url}: serves {made.composition} instead of {expected}: somebody else switches it"
            self._fleet.lose(reason)
            raise EngineDied(reason)
        self._composition = expected
        if not made.made:
            raise RolledBack(f"composition {composition}: {made.reason}; {made.composition} is served on")
        await self._resynced(lambda: all(unit.clears > count for unit, count in zip(wider, before, strict=True)))
        self._tell(made)
        return made.commit_s

    async def take_out(self, group: Group, pages: Sequence[PageHash]) -> bool:
        """Remove pages and everything below them. Whether something went. Errors: EngineError."""
        gone = False
        try:
            for first in range(0, len(pages), EVICT_BLOCKS_MAX):
                gone |= await self._verbs.evict(group, pages[first : first + EVICT_BLOCKS_MAX])
        except Unreachable as error:
            raise EngineError(f"evict: {error}") from error
        return gone

    async def _resynced(self, all_here: Callable[[], bool]) -> None:
        """The units of a wider group have told what they kept. If they do not, nothing is believed to be there."""
        try:
            async with asyncio.timeout(RESYNC_LIMIT_S), self._changed:
                await self._changed.wait_for(all_here)
        except TimeoutError:
            self._logger.warning("a merge was not followed by its events: what the units hold is not known")
            for unit in self._fleet.units:
                unit.forget()

    def _tell(self, made: Switched) -> None:
        self._logger.info(
            "switched",
            composition=made.composition,
            prepare_s=made.prepare_s,
            commit_s=made.commit_s,
            epoch=self._epoch,
        )
