"""One leader and a warm standby for a role (controller, cache manager).

The standby folds like the leader and asks for the lease. Whoever gets it announces its term through the fence before it
decides anything else, or in one batch with what has to be decided then and there. A leader that loses its lease, folds a newer
term or is fenced off stops deciding at once and is a standby again: its state was only ever changed by the log, so there is
nothing to undo and no need to restart.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import CacheLeadershipTaken, LeadershipTaken
from shared.runtime.appending import NO_ORIGIN, Fenced, Origin
from shared.runtime.background import Background
from shared.runtime.clock import Clock
from shared.runtime.fence import Fence
from shared.runtime.lease import ASK_EVERY_S, RENEW_EVERY_S
from shared.runtime.ports import Lease, Unavailable
from shared.runtime.projection import Projection

UNSURE_AFTER_NS = round(2 * RENEW_EVERY_S * 1e9)
"""Without a renewal for this long, the servers may be away."""

STOP_LIMIT_S = 2.0
"""How long a decision under way may take to be stored when the service is told to stop."""


class NotLeading(Exception):
    """Another process leads, or none does yet. Nothing was stored."""


Announce = Callable[[int], Sequence[EventData]]
"""The lease's term → the event that begins a term at least as high, and higher than every one folded; behind it what is to be
stored together with it or not at all."""

Decide = Callable[[], Sequence[EventData]]
"""What follows from the state now. It must not await: the fence covers what is folded when it is called."""


class Leadership:
    """Keeps the lease, and lets decisions through one at a time while it is held. `term` is None for a standby."""

    def __init__(
        self, lease: Lease, projection: Projection[Any], fence: Fence, announce: Announce, clock: Clock
    ) -> None:
        self.term: int | None = None
        self._renewed_ns = 0
        self._lease = lease
        self._fence = fence
        self._announce = announce
        self._clock = clock
        self._turn = asyncio.Lock()
        self._keeper = Background("leadership")
        self._announced: type[EventData] | None = None
        projection.listen(self._folded)
        self._logger = structlog.get_logger(component="leadership")

    async def start(self) -> None:
        """Begin to ask for the lease. The projection must have caught up."""
        self._keeper.start(self._keep_forever())

    async def stop(self) -> None:
        """Finish the decision under way and let a standby take over at once."""
        self.term = None
        await self._keeper.stop()
        try:
            await asyncio.wait_for(self._turn.acquire(), STOP_LIMIT_S)
        except TimeoutError:
            self._logger.warning("stopped with a decision under way", limit_s=STOP_LIMIT_S)
        await self._lease.release()

    async def failed(self) -> Exception:
        """Returns when leadership can be sought no longer: the process must end."""
        return await self._keeper.failed()

    def trouble(self, folded_term: int) -> str | None:
        """Why this process is of no use now, leader or standby; `folded_term` is the newest of the log, 0 for none."""
        if not folded_term:
            return "nobody has led yet"
        if self.term is not None and not self.in_touch:
            return "the lease cannot be renewed"
        return None

    @property
    def in_touch(self) -> bool:
        """Whether the lease was renewed just now. If not, the silence of others may be our own deafness."""
        return self.term is not None and self._clock.monotonic_ns() - self._renewed_ns < UNSURE_AFTER_NS

    async def decide(
        self, decide: Callable[[], Sequence[EventData]], origin: Origin = NO_ORIGIN
    ) -> Sequence[EventData]:
        """Call `decide`, store what it returns, fold it, return it. Waits while the log is away. Errors: NotLeading."""
        async with self._turn:
            if self.term is None:
                raise NotLeading("this process does not lead")
            decisions = decide()
            if decisions:
                await self._commit(decisions, origin)
            return decisions

    async def _commit(self, decisions: Sequence[EventData], origin: Origin) -> None:
        try:
            await self._fence.commit(decisions, origin)
        except Fenced as error:
            self._step_down(str(error))
            await self._lease.release()
            raise NotLeading(str(error)) from error

    def _folded(self, stored: Stored) -> None:
        """A newer term of this role ends ours, even before the lease is asked: what we have folded no fence refuses."""
        data = stored.data
        if self.term is None or type(data) is not self._announced:
            return
        if isinstance(data, LeadershipTaken | CacheLeadershipTaken) and data.term > self.term:
            self._step_down(f"{data.leader} leads with term {data.term}")

    async def _keep_forever(self) -> None:
        while True:
            try:
                if self.term is None:
                    await self._try_to_lead()
                elif await self._lease.renew():
                    self._renewed_ns = self._clock.monotonic_ns()
                else:
                    self._step_down("the lease was lost")
            except Unavailable as error:
                # A leader stays one: nothing can be stored meanwhile, and afterwards the fence tells whether it still is.
                self._logger.warning("lease unreachable", error=str(error))
            except NotLeading as error:
                self._logger.info("another process was faster", error=str(error))
            await self._clock.sleep(ASK_EVERY_S if self.term is None else RENEW_EVERY_S)

    async def _try_to_lead(self) -> None:
        async with self._turn:
            lease_term = await self._lease.acquire()
            if lease_term is None:
                return
            announced = self._announce(lease_term)
            taken = announced[0]
            assert isinstance(taken, LeadershipTaken | CacheLeadershipTaken), "a term begins with its announcement"
            self._announced = type(taken)
            await self._commit(announced, NO_ORIGIN)
            self._renewed_ns = self._clock.monotonic_ns()
            self.term = taken.term
            self._logger.info("leading", term=taken.term)

    def _step_down(self, reason: str) -> None:
        self._logger.warning("no longer leading", term=self.term, reason=reason)
        self.term = None
