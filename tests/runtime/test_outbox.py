"""Own facts reach the log once, in order, whatever becomes of acknowledgements."""

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest

from shared.contracts.codec import decode_at
from shared.contracts.envelope import Envelope
from shared.runtime import outbox as outbox_module
from shared.runtime import projection as projection_module
from shared.runtime.appending import Fenced, Origin
from shared.runtime.memory import ManualClock, MemoryLog
from shared.runtime.outbox import Outbox, OutboxFull
from shared.runtime.ports import Entry, LogLost
from tests.runtime.conftest import CLOCK, World
from tests.runtime.faults import FaultyLog, HastyClock
from tests.runtime.writing import contents, follower, lost, outbox, registered, sealer


@pytest.mark.parametrize("block", range(10))
async def test_lost_acknowledgements_repeat_nothing_and_lose_nothing(block: int) -> None:
    """30 seeded cases each; two subjects, so that batches span both."""
    lost_acknowledgements = 0
    for seed in range(30 * block, 30 * block + 30):
        chance = random.Random(seed)
        log, clock = MemoryLog(), HastyClock()
        faulty = FaultyLog(log, chance)
        writer = follower(faulty)
        out = Outbox(writer, sealer("router-1", clock), clock)
        await writer.start()
        await out.start()
        faulty.armed = True
        recorded = []
        for _ in range(chance.randrange(1, 12)):
            make = chance.choice([registered, lost])
            recorded += out.record([make(n) for n in range(1, chance.randrange(2, 6))])
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await out.stored(recorded[-1])
        await faulty.settle()
        assert await contents(log) == recorded, f"seed {seed}"
        assert writer.state == recorded, f"seed {seed}"
        assert [event.source_seq for event in recorded] == list(range(1, len(recorded) + 1))
        lost_acknowledgements += faulty.lost_acknowledgements
        await out.stop()
    assert lost_acknowledgements > 10, "the faults this is about must happen"


async def test_an_event_is_folded_before_it_is_stored_and_not_again_after(world: World) -> None:
    out = await outbox(world.log, "router-1", CLOCK)
    state = out._projection.state
    heard: list[int] = []
    out._projection.listen(lambda stored: heard.append(stored.stream_seq))
    (event,) = out.record([registered(1)], Origin(correlation="request-1"))
    assert state == [event]
    assert out.events == 1
    await out.stored(event)
    await out._projection.folded(1)
    assert out.events == 0
    assert state == [event]
    assert heard == [1]
    await out.stop()
    await out._projection.stop()


async def test_only_what_others_say_is_read_from_the_log_and_own_events_are_kept_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = await outbox(world.log, "router-1", CLOCK)
    other = await outbox(world.log, "router-2", CLOCK)
    read: list[str] = []

    def decode_and_note(subject: str, raw: bytes) -> Envelope:
        read.append(subject)
        return decode_at(subject, raw)

    heard: list[Envelope] = []
    out._projection.listen(lambda stored: heard.append(stored.event))
    monkeypatch.setattr(projection_module, "decode_at", decode_and_note)
    monkeypatch.setattr(projection_module, "OWN_MAX", 2)
    recorded = out.record([registered(number) for number in (1, 2, 3)])
    assert len(out._projection._own) == 2, "the first is forgotten, and will be read"
    await out.stored(recorded[-1])
    (theirs,) = other.record([lost(1)])
    await other.stored(theirs)
    await out._projection.folded(4)
    assert heard == [*recorded, theirs]
    assert sum("router-1" in subject for subject in read) <= 1 + 3, "and three times by the other, at most"
    assert not out._projection._own
    for each in (out, other):
        await each.stop()
        await each._projection.stop()


async def test_the_writer_that_is_replaced_ends_fenced(world: World) -> None:
    """Two agents of one node: the second has read the first one's last event, so the first one's next fails."""
    first = await outbox(world.log, "worker-1", CLOCK, sender="n0")
    (event,) = first.record([lost(1)])
    await first.stored(event)
    second = await outbox(world.log, "worker-2", CLOCK, sender="n0")
    (event,) = second.record([lost(2)])
    await second.stored(event)
    first.record([lost(3)])
    error = await asyncio.wait_for(first.failed(), 60)
    assert isinstance(error, Fenced)
    assert error.seq == 2
    assert [each.source for each in await contents(world.log)] == ["worker-1", "worker-2"]
    for each in (first, second):
        await each.stop()
        await each._projection.stop()


async def test_it_goes_on_when_its_old_events_have_aged_out() -> None:
    log, clock = MemoryLog(), HastyClock()
    out = await outbox(log, "worker-1", clock, sender="n0")
    (event,) = out.record([lost(1)])
    await out.stored(event)
    other = await outbox(log, "router-1", clock)
    (event,) = other.record([registered(1)])
    await other.stored(event)
    log.drop_before(2)
    (event,) = out.record([lost(2)])
    await asyncio.wait_for(out.stored(event), 60)
    assert [each.source for each in await contents(log)] == ["router-1", "worker-1"]


async def test_a_log_that_went_back_ends_it() -> None:
    log, clock = MemoryLog(), HastyClock()
    out = await outbox(log, "worker-1", clock, sender="n0")
    (event,) = out.record([lost(1)])
    await out.stored(event)
    log._messages.clear()
    log._last_seq = 0
    out.record([lost(2)])
    assert isinstance(await asyncio.wait_for(out.failed(), 60), LogLost)


async def test_a_full_outbox_refuses_and_a_stalled_one_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "EVENTS_MAX", 5)
    clock = ManualClock()
    projection = follower(MemoryLog())
    await projection.start()
    out = Outbox(projection, sealer("router-1", clock), clock)
    assert out.ready
    out.record([registered(n) for n in range(3)])
    assert out.ready
    with pytest.raises(OutboxFull, match="3 events"):
        out.record([registered(n) for n in range(3)])
    assert len(projection.state) == out.events == 3, "what was refused is neither folded nor queued"
    await clock.advance(2.1)
    assert not out.ready, "its oldest event has waited over 2 s"
    await out.start()
    await clock.advance(0)
    assert out.ready
    out.record([registered(n) for n in range(5)])
    assert not out.ready, "it is full"


async def test_an_outbox_is_bounded_by_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "BYTES_MAX", 300)
    projection = follower(MemoryLog())
    await projection.start()
    out = Outbox(projection, sealer("router-1", HastyClock()), HastyClock())
    out.record([registered(1), registered(2)])
    assert not out.ready
    with pytest.raises(OutboxFull, match="bytes wait"):
        out.record([registered(3)])


class Counting(MemoryLog):
    """Remembers how many entries and bytes each append had."""

    def __init__(self) -> None:
        super().__init__()
        self.appends: list[tuple[int, int]] = []

    async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
        self.appends.append((len(entries), sum(len(entry.payload) for entry in entries)))
        return await super().append(entries, expected)


async def test_a_batch_is_bounded_in_events_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = Counting(), HastyClock()
    out = await outbox(log, "router-1", clock)
    out.record([registered(n) for n in range(250)])
    await out.stored(out.record([registered(0)])[-1])
    assert [events for events, _ in log.appends] == [100, 100, 51]
    size = log.appends[-1][1] // 51
    log.appends.clear()
    monkeypatch.setattr(outbox_module, "BATCH_BYTES_MAX", 10 * size)
    await out.stored(out.record([registered(n) for n in range(40)])[-1])
    assert all(written <= 10 * size for _, written in log.appends)
    assert sum(events for events, _ in log.appends) == 40
    monkeypatch.setattr(outbox_module, "BATCH_BYTES_MAX", 1)
    await asyncio.wait_for(out.stored(out.record([registered(1)])[-1]), 60)
    assert log.appends[-1][0] == 1, "one event goes whatever its size"
    await out.stop()


async def test_few_events_go_one_after_the_other_and_more_in_a_batch() -> None:
    log, clock = Counting(), HastyClock()
    out = await outbox(log, "router-1", clock)
    few = outbox_module.ONE_BY_ONE_MAX
    await out.stored(out.record([registered(n) for n in range(few)])[-1])
    assert [events for events, _ in log.appends] == [1] * few
    log.appends.clear()
    await out.stored(out.record([registered(n) for n in range(few + 1)])[-1])
    assert [events for events, _ in log.appends] == [few + 1]
    await out.stop()


async def test_no_facts_are_nothing_to_record() -> None:
    log, clock = Counting(), HastyClock()
    out = await outbox(log, "router-1", clock)
    assert out.record([]) == []
    await out.stored(out.record([registered(1)])[-1])
    assert [events for events, _ in log.appends] == [1]
    await out.stop()


async def test_stop_publishes_what_waits(world: World) -> None:
    out = await outbox(world.log, "router-1", CLOCK)
    recorded = out.record([registered(n) for n in range(250)])
    await out.stop()
    assert out.events == 0
    assert await contents(world.log) == recorded
    await out._projection.stop()
