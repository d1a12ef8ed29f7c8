"""Which routers were lost, in bounded memory."""

from shared.model.lost_routers import LOST_ROUTERS_MAX, LostRouters


def test_the_one_lost_longest_ago_is_forgotten() -> None:
    lost = LostRouters(map(str, range(LOST_ROUTERS_MAX)))
    assert "0" in lost
    lost.add("one more")
    assert "0" not in lost
    assert {"1", "one more"} <= set(lost)
    assert len(list(lost)) == LOST_ROUTERS_MAX
