"""Scenarios that once failed, as small as they could be made, with a sentence about why they did."""

import pytest

from simulation.faults.running import judge
from simulation.faults.scenario import Ask, Fault, Request, Scenario, Shape

TWO_NODES = Shape(
    routers=2,
    standbys=True,
    compositions=((4, 2, 2), (4, 2, 2)),
    decode_ranks=1,
    blocks_per_rank=12,
    queue_max=8,
    skews_ms=50,
    older=True,
)

REGRESSIONS = {
    "a client that leaves in the turn in which its request was placed left it open, and its place taken, for ever": Scenario(
        seed=1,
        shape=TWO_NODES,
        requests=(Request(2.0, (0,), 20, 8, 0.0, leaves_after=0),),
        asks=(),
        faults=(),
    ),
    "a scan stored right behind its leader's first event, in a batch of its own, was taken for one decided before it": Scenario(
        seed=50,
        shape=TWO_NODES,
        requests=(Request(6.642, (0, 1), 32, 20, 0.07, sampled=True),),
        asks=(Ask(9.611, "reconfigure", 1, 0.485892),),
        faults=(Fault(7.267, "cut", "cachemgr-a", 1.003),),
    ),
}


@pytest.mark.parametrize("why", REGRESSIONS)
def test_what_failed_once_is_clean(why: str) -> None:
    verdict = judge(REGRESSIONS[why])
    assert verdict.clean, f"{why}: {verdict.violations}"
