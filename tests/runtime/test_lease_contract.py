"""What `Lease` promises, over a record in memory and over one on NATS."""

import asyncio

from shared.runtime.lease import ASK_EVERY_S, LEASE_S
from tests.runtime.conftest import World


async def test_one_leads_and_the_other_does_not(world: World) -> None:
    first, second = world.leases
    assert await first.acquire() == 1
    assert await second.acquire() is None
    assert await first.renew()
    assert await first.acquire() == 1
    assert not await second.renew()


async def test_of_many_rounds_of_two_asking_at_once_one_wins_and_the_term_rises(world: World) -> None:
    terms = []
    for _ in range(10):
        outcomes = await asyncio.gather(*(each.acquire() for each in world.leases))
        winners = [(term, lease) for term, lease in zip(outcomes, world.leases, strict=True) if term is not None]
        assert len(winners) == 1
        terms.append(winners[0][0])
        await winners[0][1].release()
    assert terms == list(range(1, 11))


async def test_a_released_lease_is_free_at_once_under_the_next_term(world: World) -> None:
    first, second = world.leases
    await first.acquire()
    await first.renew()
    await first.release()
    assert await second.acquire() == 2
    assert not await first.renew()


async def test_a_silent_leader_is_replaced_within_the_lease_and_two_questions(world: World) -> None:
    first, second = world.leases
    await first.acquire()
    while (term := await second.acquire()) is None:
        await world.lease_clock.advance(ASK_EVERY_S)
    assert term == 2
    waited_s = world.lease_clock.monotonic_ns() / 1e9
    assert LEASE_S <= waited_s < LEASE_S + 2 * ASK_EVERY_S < 5
    assert not await first.renew()
    assert await first.acquire() is None


async def test_a_leader_that_renews_is_not_replaced(world: World) -> None:
    first, second = world.leases
    await first.acquire()
    for _ in range(12):
        assert await second.acquire() is None
        await world.lease_clock.advance(ASK_EVERY_S)
        assert await first.renew()
