"""Cache events that do not fit into one event come in several, and fold to the same."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker import cache_events
from services.worker.cache_events import EVENT_BLOCKS_MAX, RUN_BLOCKS, changes, report
from services.worker.engine.protocol import Resident, Stored
from shared.contracts.codec import EVENT_BYTES_MAX
from shared.contracts.events import BlocksEvicted, BlocksStored, CacheReported
from shared.contracts.ids import BlockId, RequestId, unpack_block_ids
from tests.services.worker.scripted import worker


def ids(count: int, kind: int = 0) -> tuple[BlockId, ...]:
    return tuple(BlockId(kind.to_bytes(4, "big") + index.to_bytes(12, "big")) for index in range(count))


def test_many_evictions_come_in_several_numbered_events_before_the_store() -> None:
    gone = ids(2 * EVENT_BLOCKS_MAX + 1)
    events = changes(worker(0), 3, 7, gone, RequestId("a"), Stored(2, 5))
    assert [(type(each), each.number) for each in events] == [
        (BlocksEvicted, 8),
        (BlocksEvicted, 9),
        (BlocksEvicted, 10),
        (BlocksStored, 11),
    ]
    assert all(each.incarnation == 3 for each in events)
    assert [block for each in events[:3] for block in unpack_block_ids(each.block_ids)] == list(gone)


def test_nothing_stored_and_nothing_evicted_says_nothing() -> None:
    assert changes(worker(0), 1, 7, (), RequestId("a"), Stored(5, 0)) == []


def test_the_largest_event_stays_within_what_an_event_may_have() -> None:
    (event,) = changes(worker(0), 1, 0, ids(EVENT_BLOCKS_MAX), RequestId("a"), Stored(0, 0))
    assert len(event.model_dump_json()) < EVENT_BYTES_MAX * 0.7


def test_a_worker_that_holds_nothing_says_so() -> None:
    (event,) = report(worker(0), 1, 4, Resident())
    assert event == CacheReported(worker=worker(0), incarnation=1, number=4, part=1, parts=1, runs=())


def test_a_report_of_many_short_branches_stays_within_what_an_event_may_have() -> None:
    stem, *branches = ids(50_000)
    events = report(worker(0), 1, 4, Resident(((None, (stem,)), *((stem, (each,)) for each in branches))))
    assert sum(len(each.runs) for each in events) == 50_000
    assert max(len(each.model_dump_json()) for each in events) < EVENT_BYTES_MAX * 0.7


@given(lengths=st.lists(st.integers(1, 25), max_size=12), room=st.integers(RUN_BLOCKS + 1, 20))
def test_a_report_says_every_block_once_with_its_parent_whatever_its_parts(lengths: list[int], room: int) -> None:
    runs = tuple((None, ids(length, kind)) for kind, length in enumerate(lengths))
    before = cache_events.EVENT_BLOCKS_MAX
    cache_events.EVENT_BLOCKS_MAX = room
    try:
        events = report(worker(0), 1, 4, Resident(runs))
    finally:
        cache_events.EVENT_BLOCKS_MAX = before
    assert [(each.part, each.parts) for each in events] == [(n, len(events)) for n in range(1, len(events) + 1)]
    parents: dict[BlockId, BlockId | None] = {}
    for event in events:
        assert sum(len(run.block_ids) // 16 for run in event.runs) <= room
        for run in event.runs:
            parent = run.parent
            for block in unpack_block_ids(run.block_ids):
                assert block not in parents
                assert parent is None or parent in parents, "parents before children"
                parents[block] = parent
                parent = block
    expected = {block: parent for _, run in runs for parent, block in zip((None, *run), run, strict=False)}
    assert parents == expected
