"""The fault matrix of one reconfiguration. `--kills 20` injects each fault as often; `-rP` shows how the sagas ended."""

from collections import Counter

import pytest
import structlog
from controller_pool import N0
from saga_faults import FAULTS, NEW, OLD, SAGA, reconfigured

from shared.contracts.events import EpochAborted, EpochCommitted, ReconfigurationPlanned
from tests.replay.test_verifying import verified

ENDS = {
    "none": {"committed"},
    # The standby needs longer to lead than most steps may take, and gives them their limits anew.
    **{f"controller dies at {kind.TYPE}": {"committed"} for kind in SAGA},
    "agent refuses the drain": {"aborted at draining: refused: busy: a rank is not ready"},
    "agent refuses the switch": {"aborted at switching: refused: busy: a rank is not ready"},
    "drain does not end": {"aborted at draining: took longer than 15 s"},
    "agent does not hear the drain": {"aborted at draining: took longer than 15 s"},
    "rank dies before the switch": {"aborted at draining: node-lost"},
    "rank dies during the switch": {"aborted at switching: node-lost"},
    "agent dies while it drains": {"aborted at draining: node-lost"},
    "cachemgr is silent": {"aborted at reconciling: took longer than 2 s"},
    "an operator freezes the pool": {"aborted at draining: frozen"},
}
"""Where only one end is right."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_fails_the_node_serves_its_old_or_its_new_composition(fault: str, kills: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(max(1, kills // 4)):
        outcome = await reconfigured(fault, seed)
        outcomes[outcome.how] += 1
        events = outcome.node.events
        plans = [each for each in events if isinstance(each, ReconfigurationPlanned)]
        ends = [each for each in events if isinstance(each, EpochAborted | EpochCommitted)]
        assert len(plans) == 1
        assert [each.epoch for each in ends].count(plans[0].epoch) == 1, "a plan has one end"

        living = [each for each in outcome.members if each.leadership.term is not None]
        assert len(living) == 1, "one leads"
        state = living[0].controller.state
        node = state.pool.nodes[N0]
        committed = ends[[each.epoch for each in ends].index(plans[0].epoch)].TYPE == "epoch-committed"
        assert node.composition == (NEW if committed else OLD)
        assert node.epoch == outcome.node.served
        assert not state.sagas.open
        assert all(state.pool.schedulable(each) for each in node.workers)

        found = verified(outcome.node.log_of)
        assert found.differences == []
        assert {kind for kind, _ in found.skipped} <= {"placement-reconciled"}, "the cache manager is made up"
        assert found.checked["reconfiguration-planned"] == 1
    assert set(outcomes) <= ENDS.get(fault, set(outcomes))
    structlog.get_logger().info("outcomes", fault=fault, **outcomes)
