"""The real services through scenarios that seeds draw: modelled engine, in-memory log, virtual time.

`python -m simulation.faults --seeds 0:2000` runs more of them.
"""

import pytest

from simulation.faults.running import Parts, judge
from simulation.faults.scenario import draw

SEEDS = 200
AT_A_TIME = 20


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_seeds_are_clean(first: int) -> None:
    verdicts = [judge(draw(seed)) for seed in range(first, first + AT_A_TIME)]
    failed = [f"{each.violations[0]}: {Parts().command(each.seed)}" for each in verdicts if not each.clean]
    assert not failed, "\n".join(failed)
    assert all(each.verified > 0 for each in verdicts)


def test_tenants_wait_for_their_turns_and_meet_their_limits() -> None:
    verdict = judge(draw(13))
    assert verdict.clean, verdict.violations
    assert verdict.types["request-held"] > 0
    assert verdict.types["request-rejected"] > 0
