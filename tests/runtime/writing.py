"""Processes that write and fold, for tests."""

import asyncio
import random
from typing import Any

from shared.contracts.codec import decode
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import LeadershipTaken, NodeLost, RouterRegistered
from shared.contracts.ids import NodeId, RouterId, Source
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Clock, Ids
from shared.runtime.outbox import Outbox
from shared.runtime.ports import EventLog, Unavailable
from shared.runtime.projection import Projection
from tests.runtime.conftest import SUBJECTS

Folded = list[Envelope]

READ_TRIES_MAX = 30


def fold(state: Folded, stored: Stored) -> None:
    state.append(stored.event)


def follower(log: EventLog, *filters: str) -> Projection[Folded]:
    """A process that remembers what it folded, of the whole log unless `filters` say otherwise."""
    return Projection(log, filters or [SUBJECTS.all_events], [], fold)


def sealer(source: str, clock: Clock, sender: str | None = None, seed: int = 0) -> Sealer:
    identity = Identity("test", Source(source), sender or source)
    return Sealer(identity, SUBJECTS, clock, Ids(clock, random.Random(f"{source}{seed}")))


async def outbox(log: EventLog, source: str, clock: Clock, sender: str | None = None) -> Outbox:
    """A started outbox over a projection of its own."""
    projection = follower(log)
    started = Outbox(projection, sealer(source, clock, sender), clock)
    await projection.start()
    await started.start()
    return started


def registered(number: int) -> EventData:
    """On `….requests.<source>`."""
    return RouterRegistered(router=RouterId(f"r{number}"))


def lost(number: int) -> EventData:
    """On `….workers.<node>`."""
    return NodeLost(node=NodeId("n0"), incarnation=number, reason="test")


def taken(leader: str, term: int) -> EventData:
    """On `….control`."""
    return LeadershipTaken(leader=leader, term=term)


async def contents(log: EventLog) -> list[Envelope]:
    """Every event of a log, in order. Servers that have just lost one of them answer the next call, or the one after."""
    for _ in range(READ_TRIES_MAX):
        try:
            return await _contents(log)
        except Unavailable:
            await asyncio.sleep(0.5)
    return await _contents(log)


async def _contents(log: EventLog) -> list[Envelope]:
    events: list[Envelope] = []
    _, last = await log.bounds()

    def keep(_subject: str, _seq: int, raw: bytes) -> None:
        events.append(decode(raw))

    reader: Projection[Any] = follower(log)
    tail = await log.tail([SUBJECTS.all_events], 0, keep)
    try:
        await reader.start()
        await reader.folded(last)
        await reader.stop()
    finally:
        await tail.stop()
    return events
