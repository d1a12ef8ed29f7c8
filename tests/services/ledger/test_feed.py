import asyncio
from uuid import UUID

import pytest

from services.ledger import feed as feed_module
from services.ledger.feed import Feed, Gap, WentBack
from services.ledger.records import digest
from shared.runtime.memory import MemoryLog
from shared.runtime.ports import Entry, LogLost

SUBJECT = "s.e"


async def fill(log: MemoryLog, count: int, size: int = 1) -> None:
    _, last = await log.bounds()
    for seq in range(last + 1, last + count + 1):
        await log.append([Entry(SUBJECT, UUID(int=seq), "t", str(seq).encode() * size)], {})


async def taken(feed: Feed, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        arrivals = await feed.batch(0.05)
        assert arrivals or await asyncio.sleep(0) is None
        found += [each.stream_seq for each in arrivals]
    return found


@pytest.fixture
async def log() -> MemoryLog:
    return MemoryLog()


async def test_batches_are_bounded_and_in_order(log: MemoryLog) -> None:
    feed = Feed(log, ("s.>",))
    await fill(log, 2_500)
    await feed.start(0, b"")
    sizes = [len(await feed.batch(0.05)) for _ in range(3)]
    assert sizes == [1_000, 1_000, 500]
    assert await feed.batch(0.01) == []
    await feed.stop()


async def test_a_batch_of_large_messages_is_bounded_by_bytes(log: MemoryLog) -> None:
    feed = Feed(log, ("s.>",))
    await fill(log, 20, size=1_000_000)
    await feed.start(0, b"")
    assert sum(len(each.raw) for each in await feed.batch(0.05)) <= feed_module.BATCH_BYTES_MAX
    await feed.stop()


async def test_a_full_queue_is_taken_up_again_without_loss(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "QUEUE_EVENTS_MAX", 1_500)
    feed = Feed(log, ("s.>",))
    await fill(log, 4_000)
    await feed.start(0, b"")
    assert len(feed._queue) == 1_500, "the queue is bounded"
    assert await taken(feed, 4_000) == list(range(1, 4_001))
    await fill(log, 10)
    assert await taken(feed, 10) == list(range(4_001, 4_011))
    await feed.stop()


async def test_a_queue_of_large_messages_is_bounded_by_bytes_and_filled_again_when_half_is_free(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "QUEUE_BYTES_MAX", 10)
    monkeypatch.setattr(feed_module, "BATCH_BYTES_MAX", 1)
    feed = Feed(log, ("s.>",))
    for seq in range(1, 31):
        await log.append([Entry(SUBJECT, UUID(int=seq), "t", b"x")], {})
    await feed.start(0, b"")
    queued = [len(feed._queue)]
    for _ in range(7):
        assert len(await feed.batch(0.05)) == 1
        queued.append(len(feed._queue))
    assert queued[:6] == [10, 9, 8, 7, 6, 5], "nothing comes before half is free"
    assert await taken(feed, 23) == list(range(8, 31))
    await feed.stop()


async def test_repeated_deliveries_are_ignored(log: MemoryLog) -> None:
    feed = Feed(log, ("s.>",))
    await fill(log, 3)
    await feed.start(0, b"")
    for seq in (1, 3, 2):
        feed._deliver(SUBJECT, seq, b"again")
    assert await taken(feed, 3) == [1, 2, 3]
    await feed.stop()


async def test_dropped_messages_are_a_gap_at_the_beginning_and_in_the_middle(log: MemoryLog) -> None:
    feed = Feed(log, ("s.>",))
    await fill(log, 10)
    log.drop_before(5)
    await feed.start(2, b"")
    with pytest.raises(Gap) as found:
        await feed.batch(0.05)
    assert (found.value.from_seq, found.value.to_seq) == (3, 4)

    await feed.start(4, b"")
    feed._deliver(SUBJECT, 12, b"after a hole")
    assert await taken(feed, 6) == [5, 6, 7, 8, 9, 10]
    with pytest.raises(Gap) as found:
        await feed.batch(0.05)
    assert (found.value.from_seq, found.value.to_seq) == (11, 11)
    await feed.stop()


async def test_the_message_at_the_checkpoint_is_compared(log: MemoryLog) -> None:
    feed = Feed(log, ("s.>",))
    await fill(log, 5)
    await feed.start(3, digest(b"3"))
    assert await taken(feed, 2) == [4, 5]
    await feed.start(3, digest(b"what was recorded"))
    with pytest.raises(WentBack):
        await taken(feed, 1)
    log.drop_before(4)
    await feed.start(3, digest(b"what was recorded"))
    assert await taken(feed, 2) == [4, 5], "it is gone, so it cannot be compared"
    await feed.stop()


async def test_a_lost_log_is_told(log: MemoryLog) -> None:
    feed = Feed(log, ("s.>",))
    await feed.start(0, b"")
    log.lose(LogLost("recreated"))
    with pytest.raises(LogLost):
        await taken(feed, 1)
    await feed.stop()
