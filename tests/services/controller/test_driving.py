"""Sagas as the shell carries them, over the in-memory log and bus, with a clock that stands still until told."""

import pytest
from controller_pool import N0, Pool

from services.controller import decider
from services.controller.decider import Asker
from shared.contracts.commands import Accepted, Refused
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    ParametersChanged,
    ReconfigurationAdvised,
    ReconfigurationPlanned,
    WindowClosed,
)
from shared.contracts.ids import WorkerId
from tests.support.story import assigned, received, registered

ME = Asker("ann", "to see it")
WORKER = WorkerId("n0/1/0")


async def pool_of(composition: tuple[int, ...] = (4, 4)) -> Pool:
    pool = Pool()
    await pool.start(composition)
    pool.agent.record([registered("n0")])
    await pool.live(2)
    assert len(pool.all(EpochCommitted)) == 1
    return pool


async def ask(pool: Pool, composition: tuple[int, ...] = (2, 2, 4)) -> None:
    state = pool.controller.state
    await pool.leadership.decide(lambda: decider.reconfigure(state, N0, composition, ME))


def ends(pool: Pool) -> list[EventData]:
    return [each for each in pool.events if isinstance(each, EpochAborted | EpochCommitted)][1:]


async def test_a_reconfiguration_ends_without_waiting_for_a_tick() -> None:
    pool = await pool_of()
    await ask(pool)
    await pool.clock.advance(0)
    [committed] = ends(pool)
    assert isinstance(committed, EpochCommitted)
    assert (committed.composition, committed.epoch, committed.drain_us) == ((2, 2, 4), 2, 700_000)
    assert [each.workers for each in pool.drain_orders] == [("n0/1/0",)]
    [plan] = pool.all(ReconfigurationPlanned)
    assert (plan.policy, plan.asked_by, plan.reason) == ("operator", "ann", "to see it")
    origins = {each.event.correlation for each in pool.log_of if isinstance(each.data, DrainStarted | EpochCommitted)}
    assert origins == {"n0/1", "n0/2"}
    await pool.live(5)
    assert len(pool.drain_orders) == 1
    assert pool.metric("vertumnus_reconfigurations_total", outcome="committed") == 1, "the first epoch is none"
    assert pool.metric("vertumnus_drain_seconds_sum") == 0.7


@pytest.mark.parametrize("order", ["drain", "adopt"])
async def test_what_the_agent_refuses_is_aborted_at_once_and_tells_why(order: str) -> None:
    pool = await pool_of()
    refused = Refused(reason="busy", detail="a rank is not ready")
    if order == "drain":
        pool.drain_reply = refused
    else:
        pool.reply = refused
    await ask(pool)
    await pool.clock.advance(0)
    [aborted] = ends(pool)
    assert isinstance(aborted, EpochAborted)
    assert aborted.reason == "refused: busy: a rank is not ready"
    assert aborted.step == {"drain": "draining", "adopt": "switching"}[order]
    assert pool.metric("vertumnus_reconfigurations_total", outcome="aborted") == 1
    node = pool.controller.state.pool.nodes[N0]
    assert all(pool.controller.state.pool.schedulable(each) for each in node.workers)


async def test_a_stale_term_is_no_word_about_the_node() -> None:
    pool = await pool_of()
    pool.drain_reply = Refused(reason="stale-term", detail="term: 1 is below 2")
    await ask(pool)
    await pool.live(5)
    assert not ends(pool)
    await pool.live(11)
    [aborted] = ends(pool)
    assert aborted.reason == "took longer than 15 s"


async def test_silence_is_asked_again_and_ends_at_the_limit() -> None:
    pool = await pool_of()
    pool.drain_reply = None
    await ask(pool)
    await pool.live(10)
    asked = len(pool.drain_orders)
    assert asked >= 3
    assert not ends(pool)
    pool.drain_reply = Accepted()
    await pool.live(2)
    [committed] = ends(pool)
    assert isinstance(committed, EpochCommitted)


async def test_a_drain_that_does_not_end_is_given_up_at_its_limit() -> None:
    pool = await pool_of()
    pool.drains = False
    await ask(pool)
    await pool.live(15)
    assert not ends(pool)
    await pool.live(1)
    [aborted] = ends(pool)
    assert (aborted.step, aborted.reason) == ("draining", "took longer than 15 s")
    assert len(pool.drain_orders) == 1, "an order that was taken is not repeated"


async def test_without_a_cache_manager_the_node_comes_back_in_its_old_composition() -> None:
    pool = await pool_of()
    pool.reconciles = False
    await ask(pool)
    await pool.live(4)
    aborted, committed = ends(pool)
    assert (aborted.step, aborted.epoch) == ("reconciling", 2)
    assert (committed.composition, committed.epoch) == ((4, 4), 3)
    state = pool.controller.state
    assert all(state.pool.schedulable(each) for each in state.pool.nodes[N0].workers)


async def test_a_drain_of_a_node_renews_every_worker_and_leaves_it_cordoned() -> None:
    pool = await pool_of()
    await pool.leadership.decide(lambda: decider.drain(pool.controller.state, N0, ME))
    await pool.clock.advance(0)
    [committed] = ends(pool)
    assert (committed.composition, committed.epoch) == ((4, 4), 2)
    assert [each.workers for each in pool.drain_orders] == [("n0/1/0", "n0/1/4")]
    assert pool.controller.state.pool.nodes[N0].cordoned


def demand(pool: Pool, seconds: float, number: int) -> None:
    """One request that is predicted to take so long."""
    name = f"r{number}"
    pool.agent.record([received(name, 1_000), assigned(name, WORKER, 1_000, service_us=round(seconds * 1e6))])


async def overloaded(pool: Pool, windows: int) -> None:
    """Demand for 18 s in every window, of which two workers carry 20 s."""
    for number in range(windows):
        demand(pool, 18, number)
        await pool.live(20)
    await pool.live(1)


async def test_the_policy_acts_after_the_window_that_makes_its_signal_last() -> None:
    pool = await pool_of()
    await overloaded(pool, 2)
    assert not pool.all(ReconfigurationPlanned)
    await overloaded(pool, 1)
    [plan] = pool.all(ReconfigurationPlanned)
    windows = pool.all(WindowClosed)
    assert [each.persistence for each in windows] == [{"overload": n} for n in (1, 2, 3)]
    assert (plan.policy, plan.reason, plan.window) == ("paper", "overload for 3 windows", 3)
    assert (plan.old_composition, plan.new_composition) == ((4, 4), (2, 2, 4))
    assert plan.capacities_us == {1: 10_000_000, 2: 10_000_000, 4: 10_000_000, 8: 25_000_000}
    assert [each.composition for each in plan.alternatives] == [(2, 2, 4), (4, 2, 2)]
    assert ends(pool)[0].composition == (2, 2, 4)


async def test_an_advisory_policy_says_what_it_would_do_and_does_nothing() -> None:
    pool = await pool_of()
    change = {"reconfiguration_advisory": True}
    await pool.leadership.decide(lambda: decider.change_parameters(pool.controller.state, change, ME))
    await overloaded(pool, 4)
    advised = pool.all(ReconfigurationAdvised)
    assert [(each.window, each.new_composition) for each in advised] == [(3, (2, 2, 4)), (4, (2, 2, 4))]
    assert not pool.all(ReconfigurationPlanned)
    assert not pool.drain_orders


@pytest.mark.parametrize("how", ["off", "frozen", "pinned", "cordoned"])
async def test_a_policy_that_may_not_act_does_not(how: str) -> None:
    pool = await pool_of()
    state = pool.controller.state
    decisions = {
        "off": lambda: decider.change_parameters(state, {"reconfiguration_policy": "off"}, ME),
        "frozen": lambda: decider.freeze(state, ME),
        "pinned": lambda: decider.pin(state, N0, ME),
        "cordoned": lambda: decider.cordon(state, N0, ME),
    }
    await pool.leadership.decide(decisions[how])
    await overloaded(pool, 4)
    assert not pool.all(ReconfigurationPlanned)
    assert len(pool.all(WindowClosed)) == 4


async def test_a_node_whose_move_was_aborted_rests_for_m_windows() -> None:
    pool = await pool_of()
    pool.drain_reply = Refused(reason="engine", detail="no")
    await overloaded(pool, 7)
    assert [each.window for each in pool.all(ReconfigurationPlanned)] == [3, 6]
    assert not pool.all(ParametersChanged)
