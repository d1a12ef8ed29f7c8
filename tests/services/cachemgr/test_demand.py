"""Algorithms 1 and 2 by hand: two degree-1 workers and one of degree 4."""

import pytest
from cache_world import CacheStory, block

from services.cachemgr.decider import reconcile_placements, scan, take_leadership
from services.cachemgr.trie import power
from shared.contracts.events import CacheReported, CacheScanCompleted, NodeLost, ParametersChanged
from shared.contracts.ids import NodeId, WorkerId
from shared.model.holders import in_doubt
from tests.support.story import adopted, assigned, committed, prefilled, registered, serving

ONE, OTHER_ONE, FOUR = "n0/1/0", "n0/1/1", "n1/1/0"


@pytest.fixture
def story() -> CacheStory:
    told = CacheStory()
    told.tell(*serving("n0", (1, 1)), *serving("n1", (4,)))
    return told


def test_reuse_counts_at_the_degree_it_happened_at(story: CacheStory) -> None:
    story.stores(ONE, "a b c")
    story.receives("r", "a b c d", 450)
    story.tell(assigned("r", ONE, 250, 200), prefilled("r", ONE, 250, cached_own_tokens=200))
    assert [story.demand(name, 1)[0] for name in "abc"] == [1, 1, 0]
    assert story.demand("a", 4)[0] == 0


def test_fetched_blocks_are_not_accessed(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    story.receives("r", "a b", 250)
    story.tell(assigned("r", FOUR, 50, 200, degree=4), prefilled("r", FOUR, 50, cached_fetched_tokens=200))
    assert story.demand("a", 4)[0] == 0


def test_a_block_that_is_absent_at_the_preferred_degree_is_missed_by_its_marginal_benefit(story: CacheStory) -> None:
    story.stores(ONE, "a b c d")
    story.stores(FOUR, "a b")
    story.receives("r", "a b c d e", 550)
    story.tell(assigned("r", ONE, 150, 400, preferred_degree=4))
    # At degree 4, a and b are there; c and d would each have saved 0.19 s; e is nowhere and cannot be copied.
    assert [story.demand(name, 4)[1] for name in "abcd"] == [0, 0, pytest.approx(0.19), pytest.approx(0.19)]
    assert block("e") not in story.state.trie.nodes
    assert story.demand("c", 1) == (0, 0)


def test_a_present_degree_misses_nothing(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    story.receives("r", "a b", 250)
    story.tell(assigned("r", OTHER_ONE, 250, preferred_degree=1))
    assert story.demand("a", 1) == (0, 0)


def test_a_request_misses_once(story: CacheStory) -> None:
    story.stores(ONE, "a")
    story.receives("r", "a", 150)
    story.tell(assigned("r", ONE, 150, preferred_degree=4), assigned("r", ONE, 150, preferred_degree=4, attempt=2))
    assert story.demand("a", 4)[1] == pytest.approx(0.19)


def test_the_last_token_is_computed_so_its_block_is_worth_nothing(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    story.receives("r", "a b", 200)
    story.tell(assigned("r", ONE, 200, preferred_degree=4))
    assert [story.demand(name, 4)[1] for name in "ab"] == [pytest.approx(0.19), 0]


def test_requests_that_the_log_no_longer_knows_count_nothing(story: CacheStory) -> None:
    story.stores(ONE, "a")
    story.tell(assigned("r", ONE, 150, preferred_degree=4), prefilled("r", ONE, 50, cached_own_tokens=100))
    story.tell(assigned("s", "nx/1/0", 150), prefilled("s", "nx/1/0", 150))
    assert (story.demand("a", 1), story.demand("a", 4)) == ((0, 0), (0, 0))


def reuse(story: CacheStory, request: str, names: str, worker: str = ONE) -> None:
    blocks = len(names.split())
    story.receives(request, names, 100 * blocks + 50)
    story.tell(assigned(request, worker, 50, 100 * blocks))
    story.tell(prefilled(request, worker, 50, cached_own_tokens=100 * blocks))


def recorded_scan(story: CacheStory) -> CacheScanCompleted:
    [fact] = scan(story.state)
    story.tell(fact)
    return fact


def test_a_scan_by_hand(story: CacheStory) -> None:
    story.stores(ONE, "a b c")
    story.stores(OTHER_ONE, "a")
    for request in "123":
        reuse(story, request, "a b")
    story.receives("m", "a b c d", 450)
    story.tell(assigned("m", ONE, 450, preferred_degree=4))
    story.receives("n", "a b c d", 450)
    story.tell(assigned("n", ONE, 450, preferred_degree=4))

    fact = recorded_scan(story)

    # Inter (missed > .3 s): a, b, c at degree 4 with .38 s each. Intra (access > 2 r): b with 3 > 2 · 1, not a with 3 < 2 · 2.
    # Reclaim (access < .3 r): of the pairs (a,1) (b,1) (c,1) only c, which nobody used.
    assert (fact.inter_candidates, fact.intra_candidates, fact.reclaim_candidates) == (3, 1, 1)
    assert (fact.scan, fact.nodes, fact.holders, fact.chosen) == (1, 3, 4, ())
    assert story.demand("a", 1)[0] == pytest.approx(3 * 0.8)

    fact = recorded_scan(story)  # b has 2.4 > 2, and missed .304 > .3
    assert (fact.inter_candidates, fact.intra_candidates) == (3, 1)
    fact = recorded_scan(story)
    assert (fact.inter_candidates, fact.intra_candidates, fact.reclaim_candidates) == (0, 0, 1)


def test_a_statistic_at_its_threshold_is_neither_above_nor_below_it(story: CacheStory) -> None:
    thresholds = {"theta_inter": 0.19, "theta_intra": 2.0, "theta_reclaim": 1.0}
    story.tell(ParametersChanged(parameters_version=1, changes=thresholds, asked_by="me"))
    story.stores(ONE, "a")
    reuse(story, "r", "a")
    story.receives("m", "a", 150)
    story.tell(assigned("m", ONE, 150, preferred_degree=4))
    assert (story.demand("a", 1)[0], story.demand("a", 4)[1]) == (1, 0.19)
    [fact] = scan(story.state)
    assert (fact.inter_candidates, fact.intra_candidates, fact.reclaim_candidates) == (0, 0, 0)
    reuse(story, "s", "a")
    [fact] = scan(story.state)
    assert fact.intra_candidates == 0, "two accesses are not more than two"


def test_demand_decays_without_being_looked_at(story: CacheStory) -> None:
    story.stores(ONE, "a")
    reuse(story, "r", "a")
    for _ in range(10):
        recorded_scan(story)
    assert story.demand("a", 1)[0] == pytest.approx(0.8**10)
    reuse(story, "s", "a")
    assert story.demand("a", 1)[0] == pytest.approx(1 + 0.8**10)


def test_a_trie_in_which_nothing_happens_is_scanned_until_it_is_cold(story: CacheStory) -> None:
    story.stores(ONE, "a")
    reuse(story, "r", "a")
    scans = 0
    while scan(story.state):
        recorded_scan(story)
        scans += 1
    assert 0.8**scans < 1e-6 <= 0.8 ** (scans - 1)
    assert story.demand("a", 1) == (0, 0)
    story.stores(OTHER_ONE, "a")
    assert recorded_scan(story).scan == scans + 1
    assert scan(story.state) == []


def test_an_empty_trie_is_not_scanned() -> None:
    assert scan(CacheStory().state) == []


def test_new_thresholds_hold_at_the_next_scan(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    reuse(story, "r", "a")
    assert scan(story.state)[0].intra_candidates == 0
    changes = {"theta_intra": 0.5, "theta_reclaim": 0.001, "decay": 0.5}
    story.tell(ParametersChanged(parameters_version=1, changes=changes, asked_by="me"))
    fact = recorded_scan(story)
    assert (fact.intra_candidates, fact.reclaim_candidates) == (1, 1)
    assert story.demand("a", 1)[0] == 0.5


def test_a_retired_workers_blocks_are_no_replicas(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    story.tell(*adopted("n0", 2, ranks=2), committed("n0", 2, (2,)))
    assert story.state.trie.nodes[block("a")].replicas == (0, 0, 0, 0)
    story.state.trie.check(story.state.holders)
    assert story.state.trie.degrees == {"n0/2/0": 2, "n1/1/0": 4}


def test_a_lost_node_leaves_demand_but_no_holders(story: CacheStory) -> None:
    story.stores(ONE, "a")
    reuse(story, "r", "a")
    story.tell(NodeLost(node=NodeId("n0"), incarnation=1, reason="x"))
    assert story.demand("a", 1)[0] == 1
    assert not any(story.state.trie.nodes[block("a")].replicas)
    story.state.trie.check(story.state.holders)


def test_a_cache_in_doubt_is_asked_for(story: CacheStory) -> None:
    holders = story.state.holders
    assert in_doubt(holders, story.state.pool.alive) == {}
    story.stores(ONE, "a")
    story._numbers[ONE] += 1  # one event is missing
    story.stores(ONE, "b", below="a")
    assert in_doubt(holders, story.state.pool.alive) == {NodeId("n0"): (WorkerId(ONE),)}
    assert in_doubt(holders, {NodeId("n1")}) == {}
    story.tell(CacheReported(worker=WorkerId(ONE), incarnation=1, number=3, part=1, parts=1))
    assert in_doubt(holders, story.state.pool.alive) == {}
    story.state.trie.check(story.state.holders)


def test_terms_rise_whatever_the_lease_says() -> None:
    story = CacheStory()
    story.tell(take_leadership(story.state, "m1", 4))
    assert take_leadership(story.state, "m2", 1).term == 5


def test_power_is_repeated_multiplication_up_to_rounding() -> None:
    assert [power(0.5, n) for n in range(5)] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert power(0.8, 1_000_000) == 0.0


def test_nothing_is_reconciled_without_a_plan(story: CacheStory) -> None:
    story.tell(registered("n5"))
    assert reconcile_placements(story.state) == []
