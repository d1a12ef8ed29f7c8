"""What `EventLog` promises, in memory and on NATS."""

import asyncio
from uuid import UUID

import pytest

from shared.runtime.ports import Entry, WrongLastSequence
from tests.runtime.conftest import SUBJECTS, World
from tests.runtime.reading import Reading

A, B = f"{SUBJECTS.root}.events.requests.a", f"{SUBJECTS.root}.events.requests.b"


def entry(subject: str, number: int) -> Entry:
    return Entry(subject, UUID(int=number), "thing-happened", b"payload %d" % number)


async def test_an_empty_log_has_no_last_message(world: World) -> None:
    assert await world.log.bounds() == (1, 0)
    assert await world.log.last_on(A) is None
    assert await world.log.last_on(SUBJECTS.all_events) is None


async def test_a_batch_is_stored_in_order_with_consecutive_sequences(world: World) -> None:
    assert await world.log.append([entry(A, 1)], {A: 0}) == 1
    assert await world.log.append([entry(A, 2), entry(B, 3), entry(A, 4)], {A: 1, B: 0}) == 4
    assert await world.log.last_on(A) == (4, b"payload 4")
    assert await world.log.last_on(B) == (3, b"payload 3")
    assert await world.log.last_on(SUBJECTS.all_events) == (4, b"payload 4")
    assert await world.log.bounds() == (1, 4)


async def test_an_append_without_expectation_goes_behind_whatever_is_there(world: World) -> None:
    await world.log.append([entry(A, 1)], {})
    assert await world.log.append([entry(A, 2), entry(B, 3)], {}) == 3


@pytest.mark.parametrize("wrong", [{A: 0}, {A: 2}, {A: 1, B: 1}])
async def test_a_wrong_expectation_stores_nothing_of_the_append(world: World, wrong: dict[str, int]) -> None:
    await world.log.append([entry(A, 1)], {A: 0})
    with pytest.raises(WrongLastSequence):
        await world.log.append([entry(A, 2), entry(B, 3)], wrong)
    assert await world.log.bounds() == (1, 1)
    assert await world.log.last_on(B) is None


async def test_a_repeated_append_is_refused_or_names_the_first(world: World) -> None:
    batch = [entry(A, 1), entry(A, 2)]
    await world.log.append(batch, {A: 0})
    with pytest.raises(WrongLastSequence):
        await world.log.append(batch, {A: 0})
    await world.log.append([entry(B, 3)], {B: 0})
    with pytest.raises(WrongLastSequence):
        await world.log.append([entry(B, 3)], {B: 0})
    assert await world.log.bounds() == (1, 3)


async def test_of_two_concurrent_appends_one_wins(world: World) -> None:
    for round_number in range(10):
        last = (await world.log.last_on(A) or (0, b""))[0]
        outcomes = await asyncio.gather(
            world.log.append([entry(A, 2 * round_number + 1)], {A: last}),
            world.log.append([entry(A, 2 * round_number + 2)], {A: last}),
            return_exceptions=True,
        )
        assert sorted(type(each).__name__ for each in outcomes) == ["WrongLastSequence", "int"]


async def test_the_largest_batch_is_stored(world: World) -> None:
    entries = [entry(A if number % 3 else B, number) for number in range(1, 101)]
    assert await world.log.append(entries, {A: 0, B: 0}) == 100


async def test_a_tail_delivers_what_is_there_and_what_comes(world: World) -> None:
    await world.log.append([entry(A, 1), entry(B, 2), entry(A, 3)], {})
    reading = Reading()
    tail = await world.log.tail([A], 0, reading.deliver)
    await world.log.append([entry(B, 4)], {})
    await world.log.append([entry(A, 5)], {})
    assert await reading.reach(5) == [(A, 1, b"payload 1"), (A, 3, b"payload 3"), (A, 5, b"payload 5")]
    await tail.stop()


async def test_a_tail_starts_behind_a_sequence_and_takes_several_filters(world: World) -> None:
    await world.log.append([entry(A, 1), entry(B, 2), entry(A, 3)], {})
    reading = Reading()
    tail = await world.log.tail([SUBJECTS.control, f"{SUBJECTS.root}.events.requests.*"], 1, reading.deliver)
    await world.log.append([entry(SUBJECTS.control, 4)], {})
    assert [seq for _, seq, _ in await reading.reach(4)] == [2, 3, 4]
    await tail.stop()


async def test_a_tail_of_everything_has_no_gap(world: World) -> None:
    reading = Reading()
    tail = await world.log.tail([SUBJECTS.all_events], 0, reading.deliver)
    for start in range(1, 1001, 50):
        await world.log.append([entry(A if n % 2 else B, n) for n in range(start, start + 50)], {})
    assert [seq for _, seq, _ in await reading.reach(1000)] == list(range(1, 1001))
    await tail.stop()


async def test_a_stopped_tail_delivers_nothing(world: World) -> None:
    reading = Reading()
    tail = await world.log.tail([A], 0, reading.deliver)
    await world.log.append([entry(A, 1)], {})
    await reading.reach(1)
    await tail.stop()
    await world.log.append([entry(A, 2)], {})
    await asyncio.sleep(0.05)
    assert len(reading.messages) == 1


async def test_an_exception_out_of_deliver_ends_the_tail(world: World) -> None:
    seen: list[int] = []

    def deliver(_subject: str, seq: int, _raw: bytes) -> None:
        seen.append(seq)
        assert seq < 2, "belief broken"

    tail = await world.log.tail([A], 0, deliver)
    await world.log.append([entry(A, 1), entry(A, 2), entry(A, 3)], {})
    error = await asyncio.wait_for(tail.failed(), 60)
    assert isinstance(error, AssertionError)
    assert seen == [1, 2]
    await tail.stop()
