"""Projections that start on a log which has dropped its beginning, in memory and on a real NATS server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

from shared.contracts.envelope import Stored
from shared.model.keepsake import Keepsake, evolve
from shared.runtime.appending import NO_ORIGIN
from shared.runtime.keepsake import BadKeepsake, pack
from shared.runtime.memory import MemoryCell, MemoryLog
from shared.runtime.nats_cell import KEEPSAKE, NatsCell, open_buckets
from shared.runtime.ports import Cell, Deliver, EventLog, LogLost
from shared.runtime.projection import Place, Projection
from tests.runtime.conftest import CLOCK, SUBJECTS, NatsClient
from tests.runtime.writing import registered, sealer, taken
from tests.support import story


class Dropping(NamedTuple):
    """A log that drops what lies before a sequence, when it is told."""

    log: EventLog
    cell: Cell
    drop_before: Callable[[int], Awaitable[object]]

    def projection(self) -> Projection[list[Stored]]:
        return Projection(self.log, [SUBJECTS.all_events], [], lambda state, stored: state.append(stored), self.cell)


@pytest.fixture(params=["memory", "nats"])
async def dropping(request: pytest.FixtureRequest) -> AsyncIterator[Dropping]:
    if request.param == "memory":
        yield in_memory(MemoryLog(), MemoryCell())
        return
    async with AsyncExitStack() as stack:
        client = NatsClient(request.getfixturevalue("nats_server").url, stack)
        link = await client.link()
        await open_buckets(link, SUBJECTS, replicas=1, clock=CLOCK)
        log, js = await client.log(), link.client.jetstream()
        cell = NatsCell(link, SUBJECTS, KEEPSAKE, "pool")
        yield Dropping(log, cell, lambda seq: js.purge_stream(SUBJECTS.stream, seq=seq))


def in_memory(log: MemoryLog, cell: MemoryCell) -> Dropping:
    async def drop_before(seq: int) -> None:
        log.drop_before(seq)

    return Dropping(log, cell, drop_before)


async def write(dropping: Dropping, *terms: int) -> None:
    """A leader's term and a router each, from one source."""
    writer = sealer("controller-1", CLOCK)
    writer.next_seq = 2 * terms[0] - 1
    for term in terms:
        facts = [taken("c", term), registered(term)]
        await dropping.log.append([entry for _, entry in writer.seal(facts, NO_ORIGIN)], {})


async def keep(dropping: Dropping, revision: int = 0) -> None:
    """What a controller does."""
    keepsake = Keepsake()
    whole: Projection[Keepsake] = Projection(dropping.log, [SUBJECTS.all_events], keepsake, evolve, dropping.cell)
    await whole.start()
    await whole.stop()
    await dropping.cell.write(pack(keepsake, dropping.log.identity), revision)


async def test_what_was_dropped_is_folded_from_what_is_kept(dropping: Dropping) -> None:
    await write(dropping, 1, 2, 3)
    await keep(dropping)
    await write(dropping, 4)
    await dropping.drop_before(7)
    projection = dropping.projection()
    heard: list[int] = []
    projection.listen(lambda stored: heard.append(stored.stream_seq))
    await projection.start()
    assert [(each.stream_seq, each.event.source_seq, each.kept) for each in projection.state] == [
        (5, 5, True),
        (6, 6, True),
        (7, 7, False),
        (8, 8, False),
    ]
    assert heard == [7, 8], "only the log's own are heard"
    assert projection.last_of("controller-1") == Place(8, 8)  # type: ignore[arg-type]
    assert projection.last_on[SUBJECTS.control] == 7
    await projection.stop()


async def test_what_the_log_still_has_is_folded_from_the_log_alone(dropping: Dropping) -> None:
    await write(dropping, 1, 2, 3)
    await keep(dropping)
    for first_seq, seen in ((1, [1, 2, 3, 4, 5, 6]), (4, [4, 5, 6]), (6, [5, 6])):
        await dropping.drop_before(first_seq)
        projection = dropping.projection()
        await projection.start()
        assert [each.stream_seq for each in projection.state] == seen
        assert [each.kept for each in projection.state] == [each < first_seq for each in seen]
        await projection.stop()


async def test_an_empty_log_has_been_seen_to_its_end(dropping: Dropping) -> None:
    await write(dropping, 1, 2)
    await keep(dropping)
    await dropping.drop_before(5)
    projection = dropping.projection()
    await projection.start()
    assert ([each.stream_seq for each in projection.state], projection.seen_seq) == ([3, 4], 4)
    await write(dropping, 3)
    await asyncio.wait_for(projection.folded(6), 60)
    assert [each.stream_seq for each in projection.state] == [3, 4, 5, 6]
    await projection.stop()


async def test_kept_events_are_kept_on_by_who_starts_from_them(dropping: Dropping) -> None:
    await write(dropping, 1)
    await keep(dropping)
    await dropping.drop_before(3)
    found = await dropping.cell.read()
    assert found is not None
    await keep(dropping, revision=found[0])
    projection = dropping.projection()
    await projection.start()
    assert [each.stream_seq for each in projection.state] == [1, 2]
    await projection.stop()


async def test_dropped_events_that_nobody_kept_are_told(dropping: Dropping) -> None:
    await write(dropping, 1)
    await keep(dropping)
    await write(dropping, 2, 3)
    await dropping.drop_before(5)
    with capture_logs() as logged:
        projection = dropping.projection()
        await projection.start()
    assert [(each["event"], each["from_seq"], each["to_seq"]) for each in logged] == [
        ("dropped events are not kept", 3, 4)
    ]
    assert [each.stream_seq for each in projection.state] == [1, 2, 5, 6]
    await projection.stop()


async def test_a_log_that_drops_a_kept_event_during_the_start_ends_it() -> None:
    class Fleeting(MemoryLog):
        flees = False

        async def tail(self, filters: Sequence[str], after_seq: int, deliver: Deliver) -> Any:
            if self.flees:
                self.drop_before(6)
            return await super().tail(filters, after_seq, deliver)

    log = Fleeting()
    dropping = in_memory(log, MemoryCell())
    await write(dropping, 1, 2, 3)
    await keep(dropping)
    log.flees = True
    with pytest.raises(LogLost, match="the log dropped 5 while this process started"):
        await dropping.projection().start()
    projection = dropping.projection()
    await projection.start()
    assert [each.stream_seq for each in projection.state] == [5, 6], "the next start finds it kept"


async def test_a_fold_is_resumed_behind_what_is_folded_if_the_log_has_what_follows(dropping: Dropping) -> None:
    await write(dropping, 1, 2, 3)
    await keep(dropping)
    before = dropping.projection()
    await before.start()
    await before.stop()
    await write(dropping, 4)
    for first_seq in (1, 7):
        await dropping.drop_before(first_seq)
        resumed = dropping.projection()
        resumed.resume(before.reached)
        await resumed.start()
        assert [each.stream_seq for each in resumed.state] == [7, 8]
        assert (resumed.folded_events, resumed.kept_events, resumed.first_seq) == (2, 0, 1)
        assert resumed.last_of("controller-1") == Place(8, 8)  # type: ignore[arg-type]
        await resumed.stop()
    await dropping.drop_before(8)
    late = dropping.projection()
    late.resume(before.reached)
    with pytest.raises(LogLost, match="the log dropped 7 while this process started"):
        await late.start()
    await late.stop()


async def test_a_record_that_cannot_be_read_ends_the_start(dropping: Dropping) -> None:
    await dropping.cell.write(b"no keepsake", 0)
    with pytest.raises(BadKeepsake, match="cannot be read"):
        await dropping.projection().start()


async def test_a_new_log_begins_with_what_outlived_the_old_one() -> None:
    cell = MemoryCell()
    old, new = (in_memory(MemoryLog(name), cell) for name in ("old", "new"))
    facts = [story.registered(), taken("c", 1), *story.adopted(), story.committed()]
    await old.log.append([entry for _, entry in sealer("n0", CLOCK).seal(facts, NO_ORIGIN)], {})
    await keep(old)
    await write(new, 1)
    projection = new.projection()
    await projection.start()
    told = [(each.event.type, each.log, each.stream_seq, each.kept) for each in projection.state]
    assert told[0] == ("node-registered", "new", 0, True)
    assert told[-3] == ("epoch-committed", "new", 0, True)
    assert told[-2:] == [("leadership-taken", "new", 1, False), ("router-registered", "new", 2, False)]
    assert len(told) == 1 + 8 + 1 + 2
