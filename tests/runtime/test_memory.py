"""The in-memory world's own: a clock that is moved by hand, and subjects that match as NATS's do."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.clock import Ids
from shared.runtime.lease import LEASE_S, CellLease
from shared.runtime.memory import ManualClock, MemoryBus, MemoryCell, MemoryLog, matches
from shared.runtime.ports import NoReply, Unavailable, WrongLastSequence
from tests.runtime.conftest import World


async def test_sleepers_wake_in_order_each_at_its_own_instant() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, *naps_s: float) -> None:
        for nap_s in naps_s:
            await clock.sleep(nap_s)
            woken.append((name, clock.monotonic_ns() / 1e9))

    tasks = [asyncio.create_task(sleeper("a", 2, 1)), asyncio.create_task(sleeper("b", 1, 1, 5))]
    await clock.advance(3)
    assert woken == [("b", 1), ("a", 2), ("b", 2), ("a", 3)]
    await clock.advance(3.9)
    assert len(woken) == 4
    await clock.advance(0.1)
    assert woken[-1] == ("b", 7)
    assert all(task.done() for task in tasks)


async def test_both_times_advance_together_and_a_sleeper_that_is_cancelled_holds_up_nobody() -> None:
    clock = ManualClock(now_ns=1_000)
    sleeper = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    sleeper.cancel()
    await clock.advance(2)
    assert (clock.now_ns(), clock.monotonic_ns()) == (2_000_001_000, 2_000_000_000)


async def test_a_request_times_out_by_the_given_clock() -> None:
    clock = ManualClock()
    bus = MemoryBus(clock)

    async def silent(_subject: str, _payload: bytes) -> None:
        return None

    await bus.subscribe("a", silent)
    request = asyncio.create_task(bus.request("a", b"", 5))
    await clock.advance(4.9)
    assert not request.done()
    await clock.advance(0.2)
    with pytest.raises(NoReply, match="no answer on a within 5 s"):
        await request


def test_seeded_ids_repeat_and_are_version_7() -> None:
    ids = [[Ids(ManualClock(), random.Random(1)).next() for _ in range(2)] for _ in range(2)]
    assert ids[0] == ids[1]
    assert ids[0][0].version == 7
    assert ids[0][0].variant == "specified in RFC 4122"
    assert ids[0][0].int >> 80 == ManualClock().now_ns() // 1_000_000


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c.>", "a.b.c.d.e", True),
        ("a.*.c.>", "a.b.x.d", False),
    ],
)
def test_subjects_match_as_on_nats(pattern: str, subject: str, fits: bool) -> None:
    assert matches(pattern, subject) is fits


TOKENS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@given(TOKENS, st.data())
def test_replacing_tokens_by_stars_or_an_end_by_an_arrow_still_matches(tokens: list[str], data: st.DataObject) -> None:
    starred = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    assert matches(".".join(starred), ".".join(tokens))
    cut = data.draw(st.integers(0, len(tokens) - 1))
    assert matches(".".join([*starred[:cut], ">"]), ".".join(tokens))


async def test_dropped_messages_are_gone_and_numbers_are_not_reused() -> None:
    from tests.runtime.test_log_contract import A, B, entry

    log = MemoryLog()
    await log.append([entry(A, 1), entry(B, 2)], {})
    log.drop_before(2)
    assert await log.bounds() == (2, 2)
    assert await log.last_on(A) is None
    log.drop_before(3)
    assert await log.bounds() == (3, 2)
    assert await log.append([entry(A, 3)], {A: 0}) == 3


class FlakyCell(MemoryCell):
    """Loses the answer to a write when told to."""

    lose = False

    async def write(self, value: bytes, revision: int) -> int:
        written = await super().write(value, revision)
        if self.lose:
            raise Unavailable("fault")
        return written


async def test_a_lease_survives_lost_answers() -> None:
    cell, clock = FlakyCell(), ManualClock()
    lease = CellLease(cell, "a", clock)
    cell.lose = True
    with pytest.raises(Unavailable):
        await lease.acquire()
    cell.lose = False
    assert await lease.acquire() == 1, "it was taken, only the answer was lost"
    cell.lose = True
    with pytest.raises(Unavailable):
        await lease.renew()
    cell.lose = False
    assert await lease.renew(), "the renewal had happened"
    cell.lose = True
    await lease.release()
    cell.lose = False
    assert await CellLease(cell, "b", clock).acquire() == 2
    await lease.release()
    assert not await lease.renew()


async def test_a_standby_counts_from_the_renewal_it_has_seen() -> None:
    clock, cell = ManualClock(), MemoryCell()
    first, second = CellLease(cell, "a", clock), CellLease(cell, "b", clock)
    await first.acquire()
    for _ in range(5):
        assert await second.acquire() is None
        await clock.advance(LEASE_S - 0.1)
        assert await first.renew()
    assert await second.acquire() is None
    await clock.advance(LEASE_S - 0.1)
    assert await second.acquire() is None
    await clock.advance(0.1)
    assert await second.acquire() == 2
    assert not await first.renew()
    with pytest.raises(WrongLastSequence):
        await cell.write(b"", 1)


async def test_an_expectation_for_a_subject_that_is_not_written_to_is_a_broken_belief(world: World) -> None:
    from tests.runtime.test_log_contract import A, B, entry

    with pytest.raises(AssertionError, match="not written to"):
        await world.log.append([entry(A, 1)], {B: 0})
    with pytest.raises(AssertionError, match="101 entries"):
        await world.log.append([entry(A, number) for number in range(101)], {})
