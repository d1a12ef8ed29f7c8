"""Keeps the leader's folded state next to the log, and gives a manager that starts what was kept.

A manager that goes on from a snapshot has what a fold of the log from the snapshot's own beginning gives, and says in its term
that it has begun there. Only a leader keeps one, so the log has a term with that beginning, and what is decided later is
derived again by folding from it (`replay/leaders.py`). A snapshot is of no use to another log, to other code, under another
cost model, or once the log has dropped what follows it. Then the log is folded, and workers are asked, as without one.
"""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, NoReturn

import structlog

from services.cachemgr import freezing
from services.cachemgr.decider import State
from services.cachemgr.freezing import Folded
from services.cachemgr.metrics import Metrics
from shared.model.cost import Coefficients
from shared.runtime.clock import Clock
from shared.runtime.leadership import Leadership
from shared.runtime.ports import EventLog, Unavailable, WrongLastSequence
from shared.runtime.process_copy import CopyFailed, Elsewhere
from shared.runtime.projection import Projection
from shared.runtime.snapshots import About, BadSnapshot, Snapshots, TooLarge, announced, code_of
from shared.runtime.states import BadState

ROLE = "cachemgr"

CODE = ("services.cachemgr", "shared.model", "shared.contracts", "shared.runtime")
"""Whose change makes a snapshot void: what folds, and what reads it."""

KEEP_S_MAX = 600.0
"""A snapshot of the largest size takes a minute. What takes longer hangs: the copy of the process is ended then."""

NOT_KEPT = (Unavailable, WrongLastSequence, TooLarge, CopyFailed, OSError)
"""OSError: without memory for a copy of the process, and as TimeoutError from one that hangs."""


class Kept(NamedTuple):
    """Where snapshots are, and whose they are."""

    snapshots: Snapshots
    log: EventLog
    coefficients: Coefficients


async def resume(kept: Kept) -> Folded | None:
    """The state of the last snapshot, if the log goes on from it. Errors: Unavailable, LogLost without the log."""
    first_seq, last_seq = await kept.log.bounds()

    def fits(about: About) -> str | None:
        if about.log != kept.log.identity:
            return f"it is of log {about.log}"
        if about.code != code_of(*CODE):
            return "other code has folded it"
        if about.seen_seq > last_seq:
            return f"it has seen {about.seen_seq}, and the log ends at {last_seq}"
        if about.seen_seq < first_seq - 1:
            return f"it has seen {about.seen_seq}, and the log begins at {first_seq}"
        return None

    logger = structlog.get_logger(component="keeper")
    try:
        raw = await kept.snapshots.read(fits)
        folded = freezing.read(raw) if raw is not None else None
    except (BadSnapshot, BadState, Unavailable) as error:
        logger.warning("not resumed", reason=str(error))
        return None
    if folded is not None and folded.began_with != kept.coefficients:
        logger.warning("not resumed", reason=f"it began with the cost model {folded.began_with.version}")
        return None
    return folded


class Keeper:
    """Writes while this process leads. One that was overtaken and does not know it yet writes nothing over a newer one."""

    def __init__(
        self,
        kept: Kept,
        projection: Projection[State],
        leadership: Leadership,
        elsewhere: Elsewhere,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._kept = kept
        self._projection = projection
        self._leadership = leadership
        self._elsewhere = elsewhere
        self._clock = clock
        self._metrics = metrics
        self._kept_seq = projection.seen_seq
        self._logger = structlog.get_logger(component="keeper")

    async def run(self, every_s: float) -> NoReturn:
        """Until cancelled. One that cannot be kept is no loss but of time: the last one stays, and its turn comes again."""
        while True:
            await self._clock.sleep(every_s)
            if self._leadership.term is not None and self._projection.seen_seq > self._kept_seq:
                try:
                    await self._keep()
                except NOT_KEPT as error:
                    self._logger.error("not kept", error=f"{type(error).__name__}: {error}", kept_to_seq=self._kept_seq)

    async def _keep(self) -> None:
        began_ns, reached = self._clock.monotonic_ns(), self._projection.reached
        folded = Folded(self._projection.state, reached, self._kept.coefficients)
        about = About(self._kept.log.identity, reached.seen_seq, code_of(*CODE))
        async with aclosing(self._elsewhere(partial(_announced, folded))) as told, asyncio.timeout(KEEP_S_MAX):
            size_bytes = await self._kept.snapshots.write(about, told)
        self._kept_seq = reached.seen_seq
        took_s = (self._clock.monotonic_ns() - began_ns) / 1e9
        self._metrics.show_snapshot(reached.seen_seq, size_bytes, took_s)
        self._logger.info("kept", seen_seq=reached.seen_seq, size_bytes=size_bytes, took_s=round(took_s, 3))


def _announced(folded: Folded) -> Iterator[bytes]:
    return announced(freezing.pieces(folded))
