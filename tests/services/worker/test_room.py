"""What becomes of a step that found no room, rule by rule."""

from services.worker.room import PASSING_NS_MAX, Room


def test_fewer_go_first_then_those_that_were_begun_then_it_waits_for_prefills() -> None:
    room = Room()
    assert room.lacking(9, 0, begun=True, others_hold=True, passing=True) == "again"
    assert (room.items_max, room.begun_only) == (4, False)
    assert room.lacking(1, 0, begun=True, others_hold=True, passing=True) == "again"
    assert room.begun_only
    room.none_begun()
    assert room.lacking(1, 0, begun=False, others_hold=True, passing=False) == "wait"
    assert room.lacking(1, 0, begun=False, others_hold=False, passing=False) == "give-up"


def test_copies_and_leases_are_waited_for_as_long_as_they_may_take() -> None:
    room = Room()
    for now_ns, outcome in (
        (5, "wait"),
        (PASSING_NS_MAX + 4, "wait"),
        (PASSING_NS_MAX + 5, "give-up"),
        (2**60, "wait"),
    ):
        assert room.lacking(1, now_ns, begun=False, others_hold=False, passing=True) == outcome
    room.found()
    assert room.lacking(1, 2**61, begun=False, others_hold=False, passing=True) == "wait"
