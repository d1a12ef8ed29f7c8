"""A fold of the log."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest

from shared.contracts.codec import decode
from shared.contracts.envelope import Envelope, Stored, UnknownEvent
from shared.runtime import projection as projection_module
from shared.runtime.appending import NO_ORIGIN
from shared.runtime.memory import MemoryLog
from shared.runtime.ports import Deliver, Entry, EventLog, LogLost
from shared.runtime.projection import Place, Projection
from tests.runtime.conftest import CLOCK, SUBJECTS, World
from tests.runtime.reading import until
from tests.runtime.writing import fold, follower, registered, sealer, taken


async def write(log: EventLog, count: int = 1, source: str = "router-1") -> list[Entry]:
    entries = [entry for _, entry in sealer(source, CLOCK).seal([registered(n) for n in range(count)], NO_ORIGIN)]
    await log.append(entries, {})
    return entries


async def test_it_starts_with_everything_that_was_there(world: World) -> None:
    await write(world.log, 100)
    await write(world.log, 20, "router-2")
    projection = follower(world.log)
    await projection.start()
    assert (len(projection.state), projection.seen_seq) == (120, 120)
    assert projection.last_of("router-1") == Place(100, 100)  # type: ignore[arg-type]
    assert projection.last_of("router-2") == Place(20, 120)  # type: ignore[arg-type]
    assert projection.last_of("router-3") == Place(0, 0)  # type: ignore[arg-type]
    assert projection.last_on == {
        f"{SUBJECTS.root}.events.requests.router-1": 100,
        f"{SUBJECTS.root}.events.requests.router-2": 120,
    }
    await projection.stop()


async def test_it_sees_what_its_filters_let_through(world: World) -> None:
    projection = follower(world.log, SUBJECTS.control, f"{SUBJECTS.root}.events.requests.router-2")
    await projection.start()
    await write(world.log, 2)
    await write(world.log, 2, "router-2")
    await projection.folded(4)
    assert [event.source for event in projection.state] == ["router-2", "router-2"]
    await projection.stop()


async def test_it_continues_from_a_snapshot(world: World) -> None:
    await write(world.log, 10)
    projection = follower(world.log)
    projection.seen_seq = 7
    await projection.start()
    assert [event.source_seq for event in projection.state] == [8, 9, 10]
    await projection.stop()


async def test_an_event_that_lies_in_the_log_twice_is_folded_once() -> None:
    log = MemoryLog()
    entries = await write(log, 3)
    await log.append(entries, {})
    projection = follower(log)
    heard: list[int] = []
    projection.listen(lambda stored: heard.append(stored.stream_seq))
    await projection.start()
    assert [event.source_seq for event in projection.state] == [1, 2, 3]
    assert (heard, projection.seen_seq) == ([1, 2, 3], 6)


async def test_bytes_that_are_no_event_are_passed_over() -> None:
    log = MemoryLog()
    await write(log)
    await log.append([Entry(SUBJECTS.control, UUID(int=1), "x", b"{not json")], {})
    await write(log, 1, "router-2")
    projection = follower(log)
    await projection.start()
    assert [event.source for event in projection.state] == ["router-1", "router-2"]
    assert projection.seen_seq == 3


async def test_an_unknown_event_is_folded_as_unknown() -> None:
    log = MemoryLog()
    (entry,) = await write(log)
    fields = {**json.loads(entry.payload), "type": "thing-happened", "source_seq": 2}
    await log.append([entry._replace(payload=json.dumps(fields).encode())], {})
    projection = follower(log)
    await projection.start()
    assert isinstance(projection.state[1].data, UnknownEvent)


async def test_a_fold_that_breaks_ends_the_projection_and_its_start(world: World) -> None:
    def brittle(state: list[Envelope], stored: Stored) -> None:
        assert stored.stream_seq < 3, "belief broken"
        fold(state, stored)

    projection: Projection[list[Envelope]] = Projection(world.log, [SUBJECTS.all_events], [], brittle)
    await projection.start()
    await write(world.log, 5)
    error = await asyncio.wait_for(projection.failed(), 60)
    assert str(error).startswith("belief broken")
    assert len(projection.state) == 2
    await projection.stop()
    again: Projection[list[Envelope]] = Projection(world.log, [SUBJECTS.all_events], [], brittle)
    with pytest.raises(AssertionError, match="belief broken"):
        await again.start()
    await again.stop()


async def test_a_log_that_delivers_nothing_is_noticed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection_module, "CATCH_UP_SILENCE_S", 0.05)

    class Mute(MemoryLog):
        async def tail(self, filters: Any, after_seq: int, deliver: Deliver) -> Any:
            return await super().tail(["nothing"], after_seq, deliver)

    log = Mute()
    await write(log)
    with pytest.raises(TimeoutError, match="folded to 0, the log holds 1"):
        await follower(log).start()


async def test_whoever_waits_for_an_event_is_woken_by_it_or_a_later_one() -> None:
    log = MemoryLog()
    projection = follower(log)
    await projection.start()
    waiting = [asyncio.create_task(projection.folded(seq)) for seq in (1, 2, 5)]
    given_up = asyncio.create_task(projection.folded(2))
    await asyncio.sleep(0)
    given_up.cancel()
    await write(log, 3)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    await write(log, 3, "router-2")
    await asyncio.wait_for(waiting[2], 60)
    await projection.folded(3)
    assert projection._waiters == []


async def test_a_lost_log_is_told() -> None:
    log = MemoryLog()
    projection = follower(log)
    await projection.start()
    log.lose(LogLost("recreated"))
    assert str(await asyncio.wait_for(projection.failed(), 60)) == "recreated"


async def test_a_stopped_projection_never_fails(world: World) -> None:
    projection = follower(world.log)
    await projection.start()
    failed = asyncio.create_task(projection.failed())
    await projection.stop()
    await asyncio.sleep(0.05)
    assert not failed.done()
    failed.cancel()


async def test_events_carry_what_they_were_sealed_with() -> None:
    log = MemoryLog()
    writer = sealer("controller-1", CLOCK)
    (one, entry), (two, _) = writer.seal([taken("c", 1), taken("c", 2)], NO_ORIGIN)
    assert (one.source_seq, two.source_seq, writer.next_seq) == (1, 2, 3)
    assert (entry.subject, entry.type, entry.id) == (SUBJECTS.control, "leadership-taken", one.id)
    assert decode(entry.payload) == one
    await log.append([entry], {})
    projection = follower(log)
    await projection.start()
    await until(lambda: projection.state == [one])
