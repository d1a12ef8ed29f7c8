"""The cache manager's orders in virtual time: blocks move between real KV indexes, and what the log says is what they hold."""

from functools import partial
from random import Random

import pytest

from services.controller.saga import Move
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    BlocksStored,
    CacheScanCompleted,
    PrefillCompleted,
    ReclamationRequested,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
    ReplicationRequested,
)
from shared.contracts.ids import BlockId, NodeId
from shared.model.cost import load_coefficients
from simulation.policies.arrivals import requests_of
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.workloads.drifting import Drift, drifting

DRIFT = Drift(epochs=3, epoch_s=10, requests_per_s=12)
POLICIES = {
    "paper": {"cache_policy": "paper"},
    "regret": {"cache_policy": "regret", "scan_every_s": 0.5, "beta": 1.0},
}


def simulated(policy: str) -> tuple[Simulation, list[Stored]]:
    log: list[Stored] = []
    setup = Setup(
        ((4, 4), (4, 4), (8,)),
        load_coefficients("qwen3_30b_a3b_h20"),
        parameters=POLICIES[policy],
        blocks_per_rank=200,
        cache_manager=True,
    )
    simulation = Simulation(setup, log.append)
    simulation.run(requests_of(drifting(Random(1), DRIFT), 512))
    return simulation, log


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_and_reclamations_end_as_the_log_says(policy: str) -> None:
    simulation, log = simulated(policy)
    simulation.check()
    asked = {each.data.operation: each.data for each in log if isinstance(each.data, ReplicationRequested)}
    ended = [each.data.operation for each in log if isinstance(each.data, ReplicaInstalled | ReplicationFailed)]
    assert len(ended) == len(set(ended)) > 3
    assert set(ended) <= asked.keys()
    copied = [each.data for each in log if isinstance(each.data, BlocksStored) and each.data.cause == "replication"]
    assert copied, "what was asked for has moved"
    scans = [each.data for each in log if isinstance(each.data, CacheScanCompleted)]
    assert {name for scan in scans for name in scan.chosen} >= asked.keys()
    reclaimed = {each.data.operation for each in log if isinstance(each.data, ReplicaReclaimed)}
    wanted = {each.data.operation for each in log if isinstance(each.data, ReclamationRequested)}
    assert reclaimed <= wanted
    assert (policy == "paper") == bool(wanted), "regret leaves a cache that is not full alone"
    manager = simulation.control.manager
    assert manager is not None
    manager.trie.check(manager.holders)
    manager.backlog.check()
    for node in simulation.nodes.values():
        for worker, group in node.steps.groups.items():
            resident = {block for _, run in node.steps.pool.resident(group).runs for block in run}
            assert resident == {block for block, _ in manager.holders.index.held(worker)}


def test_a_prompt_after_a_split_brings_what_lies_on_the_other_ranks_and_after_a_merge_nothing() -> None:
    """One node of four ranks: as one worker, as two, and as one again. The same prompt of 20 blocks in each time."""
    log: list[Stored] = []
    chain = tuple(BlockId(number.to_bytes(16)) for number in range(20))
    setup = Setup(((4,),), load_coefficients("qwen3_30b_a3b_h20"), cache_manager=True)
    simulation = Simulation(setup, log.append)
    for at_s, composition in ((10, (2, 2)), (30, (4,))):
        move = Move(NodeId("n0"), composition, "operator", "test")
        simulation.agenda.after(at_s, partial(simulation.control.move, move))
    simulation.run([Asked(at_s * 10**9, 20 * 512 + 1, chain) for at_s in (1, 20, 25, 40)])
    simulation.check()
    prefills = [each.data for each in log if isinstance(each.data, PrefillCompleted)]
    assert [each.computed_tokens for each in prefills] == [20 * 512 + 1, 1, 1, 1]
    brought = prefills[1].cached_fetched_tokens
    assert brought in (18 * 512, 20 * 512), "a half of two ranks had two blocks of the path at hand, or none"
    assert [each.cached_fetched_tokens for each in prefills] == [0, brought, 0, 0]
    causes = [each.data.cause for each in log if isinstance(each.data, BlocksStored)]
    assert causes.count("reconciliation") == 1
