"""What the controller holds, and for whom."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sglang.plugin.ballot import Decision
from services.worker.engine.sglang.plugin.desk import COMMIT_GRACE_S, HELD_S_MAX, Desk
from services.worker.engine.sglang.plugin.places import touched
from services.worker.engine.sglang.plugin.wire import Commit, InForce, Prepare, Release
from shared.model.lattice import Composition
from tests.support.compositions import compositions

ONES = (1, 1, 1, 1)


def held(desk: Desk) -> list[int]:
    return [unit for unit in range(4) if desk.holds(unit)]


def test_a_switch_by_hand() -> None:
    desk = Desk(4)
    assert desk.prepare(Prepare(1, (1, 1, 2), 5.0), 0.0) == InForce(ONES)
    assert held(desk) == [2, 3]
    assert desk.commit(Commit(1, (1, 1, 2), 3.0), 1.0) == InForce(ONES)
    assert not desk.expired(4.0)
    assert held(desk) == [2, 3]
    assert desk.ends(Release(1))
    desk.end(Decision.COMMIT)
    assert held(desk) == []
    assert desk.composition == (1, 1, 2)
    assert [desk.leader(unit) for unit in range(4)] == [0, 1, 2, 2]


def test_a_lease_ends_unless_it_is_renewed() -> None:
    desk = Desk(4)
    desk.prepare(Prepare(1, (4,), 5.0), 0.0)
    desk.prepare(Prepare(1, (4,), 5.0), 4.0)
    assert not desk.expired(8.9)
    assert desk.expired(9.0)
    desk.end(Decision.ABORT)
    assert held(desk) == []
    assert desk.commit(Commit(1, (4,), 3.0), 9.1).lapsed
    assert desk.prepare(Prepare(1, (4,), 5.0), 9.2).lapsed
    assert not desk.prepare(Prepare(2, (4,), 5.0), 9.3).lapsed


def test_a_commit_outlives_the_lease_of_its_prepare() -> None:
    desk = Desk(4)
    desk.prepare(Prepare(1, (4,), 1.0), 0.0)
    desk.commit(Commit(1, (4,), 10.0), 0.9)
    assert not desk.expired(0.9 + 10.0 + COMMIT_GRACE_S - 0.1)
    assert desk.expired(0.9 + 10.0 + COMMIT_GRACE_S)


def test_no_client_holds_work_for_ever() -> None:
    desk = Desk(4)
    for now_s in range(int(HELD_S_MAX)):  # two epochs in turn, each asked for again and again
        assert not desk.expired(now_s)
        desk.prepare(Prepare(1 + now_s // 60, (4,) if now_s // 60 % 2 else (2, 2), 5.0), now_s)
    assert not desk.expired(HELD_S_MAX - 0.1)
    assert desk.expired(HELD_S_MAX)
    desk.commit(Commit(10, (4,), 3.0), HELD_S_MAX - 0.1)
    assert not desk.expired(HELD_S_MAX), "what is decided by then is followed"


def test_a_commit_is_passed_on_once() -> None:
    desk = Desk(4)
    desk.prepare(Prepare(1, (4,), 1.0), 0.0)
    assert not desk.commit(Commit(1, (4,), 1.0), 0.0).lapsed
    assert desk.commit(Commit(1, (4,), 1.0), 0.0).lapsed
    assert desk.prepare(Prepare(2, (2, 2), 1.0), 0.0).lapsed, "units are voting"


def test_a_newer_epoch_takes_the_place_of_one_that_was_only_prepared() -> None:
    desk = Desk(4)
    desk.prepare(Prepare(1, (2, 1, 1), 5.0), 0.0)
    assert not desk.prepare(Prepare(2, (1, 1, 2), 5.0), 1.0).lapsed
    assert held(desk) == [2, 3]
    assert desk.commit(Commit(1, (2, 1, 1), 5.0), 1.0).lapsed
    assert not desk.ends(Release(1))
    assert desk.prepare(Prepare(1, (2, 1, 1), 5.0), 1.0).lapsed


VERBS = st.one_of(
    st.builds(Prepare, st.integers(1, 6), compositions(4, True), st.floats(0.5, 5)),
    st.builds(Commit, st.integers(1, 6), compositions(4, True), st.floats(0.5, 5)),
    st.builds(Release, st.integers(1, 6)),
    st.floats(0.1, 20),
)


@given(st.lists(st.tuples(VERBS, st.sampled_from(Decision)), max_size=30))
def test_any_sequence_of_verbs_ends_with_nothing_held(sequence: list[tuple[object, Decision]]) -> None:
    """Time passing (a float) ends leases as the controller does. A decision counts only where units were told to vote."""
    desk, now_s = Desk(4), 0.0
    begun: list[int] = []
    for verb, decision in sequence:
        before: Composition = desk.composition
        match verb:
            case Prepare():
                lapsed = desk.prepare(verb, now_s).lapsed
                if not lapsed and verb.epoch not in begun:
                    begun.append(verb.epoch)
                    assert begun == sorted(begun), "epochs rise"
                if not lapsed:
                    assert held(desk) == list(touched(before, verb.composition))
            case Commit():
                if not desk.commit(verb, now_s).lapsed:
                    assert begun[-1] == verb.epoch
            case Release():
                if desk.ends(verb):
                    _end(desk, decision)
            case float():
                now_s += verb
                if desk.expired(now_s):
                    _end(desk, decision)
        assert desk.pending is not None or not held(desk)
    if desk.pending is not None:
        assert desk.expired(desk.pending.deadline_s)
        _end(desk, Decision.ABORT)
    assert held(desk) == []


def _end(desk: Desk, decision: Decision) -> None:
    pending, before = desk.pending, desk.composition
    assert pending is not None
    desk.end(decision if pending.committing else Decision.ABORT)
    committed = pending.committing and decision is Decision.COMMIT
    assert desk.composition == (pending.composition if committed else before)
