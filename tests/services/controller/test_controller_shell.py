"""The controller's shell over the in-memory log and bus, with a clock that stands still until told."""

from controller_pool import N0, SUBJECTS, Pool
from structlog.testing import capture_logs

from shared.contracts.commands import Accepted, Refused
from shared.contracts.events import EpochCommitted, LeadershipTaken, NodeDeclaredLost, WindowClosed
from tests.support.story import registered


async def test_a_node_adopts_and_is_committed() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(1)
    [epoch] = pool.all(EpochCommitted)
    assert (epoch.composition, {each.capacity_us for each in epoch.workers}) == ((4, 4), {10_000_000})
    assert {each.capacity_version for each in epoch.workers} == {None}, "an estimate names no set"
    assert len(pool.commands) == 1


async def test_a_profiled_degree_has_the_capacity_of_its_profile() -> None:
    pool = Pool()
    await pool.start(composition=(8,))
    pool.agent.record([registered("n0")])
    await pool.live(1)
    [epoch] = pool.all(EpochCommitted)
    assert [(each.capacity_us, each.capacity_version) for each in epoch.workers] == [(25_000_000, "p-1")]


async def test_a_misfit_is_said_once_and_tried_again_with_the_next_life() -> None:
    pool = Pool()
    await pool.start(composition=(2, 2))
    pool.agent.record([registered("n0")])
    await pool.live(3)
    assert pool.metric("vertumnus_epoch_refusals_total", node="n0", reason="misfit") == 1
    assert not pool.commands
    pool.agent.record([registered("n0", incarnation=2)])
    await pool.live(3, incarnation=2)
    assert pool.metric("vertumnus_epoch_refusals_total", node="n0", reason="misfit") == 2
    pool.agent.record([registered("n0", incarnation=3, ranks=4)])
    pool.reply = Refused(reason="busy")
    await pool.live(1, incarnation=3)
    assert [each.composition for each in pool.commands][:1] == [(2, 2)]


async def test_refusals_are_repeated_each_second_and_a_stale_number_is_left() -> None:
    pool = Pool()
    await pool.start()
    pool.reply = Refused(reason="busy")
    pool.agent.record([registered("n0")])
    await pool.live(4)
    assert 3 <= len(pool.commands) <= 4
    pool.reply = Refused(reason="stale-epoch", detail="epoch: 1 is not above 1")
    await pool.live(2)
    pool.reply = Accepted()
    await pool.live(2)
    assert pool.commands[0].epoch == 1
    [epoch] = pool.all(EpochCommitted)
    assert epoch.epoch > 1
    assert pool.commands[-1].epoch == epoch.epoch


async def test_a_repeated_refusal_is_logged_once() -> None:
    pool = Pool()
    with capture_logs() as logged:
        await pool.start()
        pool.reply = Refused(reason="draining")
        pool.agent.record([registered("n0")])
        await pool.live(4)
        pool.reply = Refused(reason="busy")
        await pool.live(4)
        pool.reply = Accepted()
        await pool.live(2)
        pool.reply = Refused(reason="busy")
        pool.agent.record([registered("n0", incarnation=2)])
        await pool.live(4, incarnation=2)
    said = [(each["incarnation"], each["reason"]) for each in logged if each["event"] == "epoch not adopted"]
    assert said == [(1, "draining"), (1, "busy"), (2, "busy")]
    assert len(pool.commands) > 8, "it was asked again and again"


async def test_silence_is_noticed_and_deafness_forgives_it() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(8)
    pool.controller._ticked_ns -= 10 * 10**9  # the process stood still: the next tick comes late
    pool.beating = False
    await pool.live(4)
    assert not pool.all(NodeDeclaredLost)
    await pool.live(2)
    [lost] = pool.all(NodeDeclaredLost)
    assert lost.silent_us >= 5_000_000


async def test_nobody_is_lost_while_the_servers_are_away() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(8)
    pool.cell.away, pool.beating = True, False
    await pool.live(20)
    assert pool.controller.ready() == "the lease cannot be renewed"
    pool.cell.away = False
    await pool.live(4)
    assert not pool.all(NodeDeclaredLost)
    await pool.live(5)
    assert len(pool.all(NodeDeclaredLost)) == 1


async def test_windows_close_on_time_and_are_shown() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered("n0")])
    await pool.live(41)
    windows = pool.all(WindowClosed)
    assert [each.k for each in windows] == [1, 2]
    assert all(20_000_000 <= each.length_us <= 20_300_000 for each in windows)
    assert windows[1].from_seq == windows[0].to_seq
    assert pool.metric("vertumnus_window_capacity_seconds") == windows[1].capacity_us / 1e6
    assert pool.metric("vertumnus_controller_term") == 1


async def test_a_standby_decides_nothing_and_knows_why_it_is_not_ready() -> None:
    pool = Pool()
    await pool.start()
    assert pool.controller.ready() is None
    assert pool.leadership.trouble(0) == "nobody has led yet"
    await pool.leadership.stop()
    pool.agent.record([registered("n0")])
    await pool.live(30)
    assert [type(each) for each in pool.events if not isinstance(each, LeadershipTaken)] == [type(registered())]
    assert not pool.commands


async def test_what_is_no_heartbeat_is_counted() -> None:
    pool = Pool()
    await pool.start()
    await pool.bus.publish(SUBJECTS.load(N0), b"{")
    await pool.bus.publish(f"{SUBJECTS.root}.alive.r1", b"[]")
    await pool.clock.advance(0)
    assert pool.metric("vertumnus_unreadable_heartbeats_total") == 2


async def test_more_losses_than_one_append_holds_take_two() -> None:
    pool = Pool()
    await pool.start()
    pool.agent.record([registered(f"m{number}") for number in range(150)])
    await pool.live(8)
    assert len(pool.all(NodeDeclaredLost)) == 150
