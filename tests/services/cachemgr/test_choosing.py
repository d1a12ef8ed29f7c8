"""What a scan asks for, by hand. n0 has workers of degree 1, 1 and 2, n1 and n2 one of degree 4. Blocks have 100 tokens."""

import pytest
from cache_world import CacheStory, block

from services.cachemgr.decider import scan, settle
from services.cachemgr.reclamation import RECLAIM_S_MAX, order
from services.cachemgr.regret import regret
from services.cachemgr.replication import REST_SCANS
from shared.contracts.copy_commands import Evict
from shared.contracts.events import (
    BlockRun,
    BlocksEvicted,
    CacheReported,
    CacheScanCompleted,
    Cordoned,
    Frozen,
    NodeRegistered,
    ParametersChanged,
    PricedCandidate,
    ReclamationFailed,
    ReclamationRequested,
    ReplicaReclaimed,
    ReplicationRequested,
)
from shared.contracts.ids import NodeId, WorkerId, node_of
from tests.support.story import assigned, completed, prefilled, serving

ONE, OTHER_ONE, TWO = (WorkerId(f"n0/1/{rank}") for rank in (0, 1, 2))
FOUR, OTHER_FOUR = WorkerId("n1/1/0"), WorkerId("n2/1/0")


@pytest.fixture
def story() -> CacheStory:
    told = CacheStory()
    told.tell(*serving("n0", (1, 1, 2)), *serving("n1", (4,)), *serving("n2", (4,)))
    told.tell(changes("paper"))
    return told


def changes(policy: str, version: int = 1, **more: float) -> ParametersChanged:
    return ParametersChanged(
        parameters_version=version, changes={"cache_policy": policy, **more}, asked_by="ann", reason=""
    )


def copies(story: CacheStory) -> list[ReplicationRequested]:
    return [each for each in scan(story.state) if isinstance(each, ReplicationRequested)]


def reclaims(story: CacheStory) -> list[ReclamationRequested]:
    return [each for each in scan(story.state) if isinstance(each, ReclamationRequested)]


def misses(story: CacheStory, request: str, names: str, degree: int, worker: str = ONE) -> None:
    """A request for a prompt of these blocks would rather go to `degree`; it was served elsewhere and is over."""
    tokens = 100 * len(names.split()) + 50
    story.receives(request, names, tokens)
    story.tell(assigned(request, worker, tokens, preferred_degree=degree), completed(request, worker, 1))


def reuses(story: CacheStory, request: str, names: str, worker: str) -> None:
    tokens = 100 * len(names.split())
    story.receives(request, names, tokens + 50)
    story.tell(
        assigned(request, worker, 50, tokens, preferred_degree=4),
        prefilled(request, worker, 50, cached_own_tokens=tokens),
    )
    story.tell(completed(request, worker, 1))


def waits(story: CacheStory, request: str, worker: str, service_us: int, tokens: int = 50) -> None:
    """A prompt that shares nothing waits at the worker."""
    story.receives(request, "", tokens)
    story.tell(assigned(request, worker, tokens, service_us=service_us, attempt=2))


# --- first copies


def test_one_copy_of_the_longest_path_that_degree_four_misses(story: CacheStory) -> None:
    story.stores(ONE, "a b c")
    misses(story, "r1", "a b c", 4)
    misses(story, "r2", "a b c", 4)
    [asked] = copies(story)  # 0.38 s were missed for each block, above 0.3
    assert asked == ReplicationRequested(
        operation="copy-1-1",
        z=block("c"),
        degree=4,
        kind="inter",
        sources=(ONE,),
        destination=FOUR,
        first_depth=0,
        blocks=3,
        score=asked.score,
    )
    assert asked.score == pytest.approx(3 * 0.38 / 3)
    [done, *_] = scan(story.state)
    assert isinstance(done, CacheScanCompleted)
    assert (done.chosen, done.inter_candidates) == (("copy-1-1",), 3)


def test_a_path_is_copied_once_even_if_a_block_on_it_is_no_candidate(story: CacheStory) -> None:
    story.stores(ONE, "a b c")
    for name in "ac":
        story.state.trie.missed(story.state.trie.nodes[block(name)], 4, 1.0)
    assert [each.z for each in copies(story)] == [block("c")]


def test_copies_of_one_scan_leave_room_for_each_other(story: CacheStory) -> None:
    """Prompts of 3,998 blocks wait at both workers of degree 4, which have 4,000: each has room for one of three paths."""
    for number, worker in enumerate((FOUR, OTHER_FOUR)):
        waits(story, f"w{number}", worker, 1_000, tokens=399_800)
    for names in ("a b", "p q", "x y"):
        story.stores(ONE, names)
        for number in range(2):
            misses(story, f"{names[0]}{number}", names, 4)
    found = copies(story)
    assert sorted(each.destination for each in found) == [FOUR, OTHER_FOUR]
    assert len({each.z for each in found}) == 2


def test_each_list_has_a_limit_of_its_own(story: CacheStory) -> None:
    story.tell(changes("paper", 2, cache_operations_max=1))
    story.stores(ONE, "a")
    story.stores(ONE, "x")
    story.stores(FOUR, "p")
    for number in range(3):
        misses(story, f"a{number}", "a", 4)
        misses(story, f"x{number}", "x", 4)
        reuses(story, f"p{number}", "p", FOUR)
    assert [each.kind for each in copies(story)] == ["inter", "intra"]


def test_nothing_is_asked_for_at_or_below_the_threshold_or_without_a_manager(story: CacheStory) -> None:
    story.stores(ONE, "a")
    misses(story, "r1", "a", 4)
    assert copies(story) == [], "0.19 s are less than 0.3"
    misses(story, "r2", "a", 4)
    assert len(copies(story)) == 1
    story.tell(changes("lru", 2))
    assert copies(story) == []


def test_a_frozen_pool_copies_and_reclaims_nothing(story: CacheStory) -> None:
    story.stores(ONE, "a")
    story.stores(FOUR, "x")
    for number in range(2):
        misses(story, f"r{number}", "a", 4)
    assert len(copies(story)) == len(reclaims(story)) == 1
    story.tell(Frozen(asked_by="ann", reason=""))
    assert [type(each) for each in scan(story.state)] == [CacheScanCompleted]


def test_the_gain_per_copied_block_decides_who_is_first(story: CacheStory) -> None:
    story.stores(ONE, "a b c d")
    story.stores(ONE, "x")
    story.stores(FOUR, "a b c")
    for number in range(2):
        misses(story, f"x{number}", "x", 4)
    for number in range(3):
        misses(story, f"d{number}", "a b c d", 2)
    found = copies(story)
    # d at degree 2: 4 blocks x 0.87 s / 4 blocks; x at degree 4: 0.38 s / 1 block.
    assert [(each.z, each.degree, each.blocks) for each in found] == [(block("d"), 2, 4), (block("x"), 4, 1)]
    assert [each.score for each in found] == [pytest.approx(3 * 0.29), pytest.approx(2 * 0.19)]
    assert [each.operation for each in found] == ["copy-1-1", "copy-1-2"]
    story.tell(changes("paper", 2, cache_operations_max=1))
    assert [each.z for each in copies(story)] == [block("d")]


def test_the_destination_holds_most_of_the_path_then_has_the_least_load(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    for number in range(2):
        misses(story, f"r{number}", "a b", 4)
    waits(story, "w", FOUR, 1_000)
    assert copies(story)[0].destination == OTHER_FOUR
    story.stores(FOUR, "a")
    assert (copies(story)[0].destination, copies(story)[0].first_depth) == (FOUR, 1), "b alone is missing there"
    story.tell(Cordoned(node=NodeId("n1"), asked_by="ann", reason=""))
    assert copies(story)[0].destination == OTHER_FOUR


def test_a_worker_without_room_gets_nothing(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    for number in range(2):
        misses(story, f"r{number}", "a b", 4)
    for worker in (FOUR, OTHER_FOUR):  # 4 x 1,000 blocks, of which prompts under way need all but one
        waits(story, f"w-{node_of(worker)}", worker, 1, tokens=399_900)
    assert copies(story) == []
    story.tell(completed("w-n1", FOUR, 1))
    assert [each.destination for each in copies(story)] == [FOUR]


def test_a_path_is_not_asked_for_twice_nor_in_pieces(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    for number in range(3):
        misses(story, f"r{number}", "a b", 4)
    [asked] = copies(story)
    story.tell(asked)
    assert copies(story) == [], "z and what is above it are on their way"
    story.stores(ONE, "c", below="b")
    for number in range(3):
        misses(story, f"s{number}", "a b c", 4)
    assert copies(story) == [], "what is below waits for it"
    story.stores(FOUR, "a b")
    story.tell(*settle(story.state, story.now_ns, {}))
    [longer] = copies(story)
    assert (longer.z, longer.destination, longer.first_depth) == (block("c"), FOUR, 2)


def test_a_copy_that_fails_at_a_worker_rests_there_and_may_go_to_another(story: CacheStory) -> None:
    story.stores(ONE, "a")
    tried = []
    for number in range(REST_SCANS + 2):
        for each in range(3):
            misses(story, f"r{number}-{each}", "a", 4)
        found = scan(story.state)
        story.tell(*found)
        asked = [each for each in found if isinstance(each, ReplicationRequested)]
        tried += [each.destination for each in asked]
        story.tell(*settle(story.state, story.now_ns, {each.operation: "full" for each in asked}))
    assert tried == [FOUR, OTHER_FOUR, FOUR]


# --- more copies


def test_a_second_copy_when_accesses_per_copy_pass_the_threshold(story: CacheStory) -> None:
    story.stores(FOUR, "a b")
    for number in range(2):
        reuses(story, f"r{number}", "a b", FOUR)
    assert copies(story) == [], "2 accesses are not more than 2"
    reuses(story, "r2", "a b", FOUR)
    [asked] = copies(story)
    assert (asked.kind, asked.degree, asked.z) == ("intra", 4, block("b"))
    assert (asked.sources, asked.destination, asked.score) == ((FOUR,), OTHER_FOUR, 3.0)
    story.stores(OTHER_FOUR, "a b")
    assert copies(story) == [], "3 accesses of 2 copies; and no worker is left"


def test_of_nearly_equal_copies_the_smaller_goes_first(story: CacheStory) -> None:
    story.stores(FOUR, "a b c")
    story.stores(FOUR, "x")
    for number in range(20):
        reuses(story, f"a{number}", "a b c", FOUR)
    for number in range(19):
        reuses(story, f"x{number}", "x", FOUR)
    assert [(each.z, each.blocks) for each in copies(story)] == [(block("x"), 1), (block("c"), 3)]
    for number in range(3):
        reuses(story, f"b{number}", "a b c", FOUR)
    assert [each.z for each in copies(story)] == [block("c"), block("x")], "23 and 19 differ by more than 10 %"


def test_a_quiet_holder_is_the_source(story: CacheStory) -> None:
    story.tell(*serving("n3", (4,)), *serving("n4", (4,)))
    third, fourth = WorkerId("n3/1/0"), WorkerId("n4/1/0")
    for worker in (FOUR, OTHER_FOUR):
        story.stores(worker, "a")
    for number in range(5):
        reuses(story, f"r{number}", "a", FOUR)
    # The lowest quarter of four loads is the first of them; both holders are above it, and the quieter one is asked first.
    for worker, service_us in ((FOUR, 30), (OTHER_FOUR, 20), (third, 10)):
        waits(story, f"w-{node_of(worker)}", worker, service_us)
    [asked] = copies(story)
    assert (asked.sources, asked.destination) == ((OTHER_FOUR, FOUR), fourth)


# --- reclamation


def test_what_is_cold_goes_from_the_fullest_cache_tip_by_tip(story: CacheStory) -> None:
    story.stores(FOUR, "a b c")
    story.stores(OTHER_FOUR, "a b c x y")
    found = reclaims(story)
    # y and the path above it are as cold, and at the fuller worker; c is no tip, for x hangs below it somewhere.
    assert [(each.z, each.worker, each.blocks) for each in found] == [(block("y"), OTHER_FOUR, 5)]
    story.tell(*found)
    assert reclaims(story) == [], "it is under way"
    reclaiming = story.state.operations.reclaiming["reclaim-1-1"]
    path = b"".join(map(block, "abcxy"))
    assert order(reclaiming, story.state.trie, 3) == Evict(
        term=3, operation="reclaim-1-1", worker=OTHER_FOUR, block_ids=path
    )


def test_a_warm_ancestor_stays(story: CacheStory) -> None:
    story.stores(FOUR, "a b c")
    reuses(story, "r", "a", FOUR)
    assert [(each.z, each.blocks) for each in reclaims(story)] == [(block("c"), 2)]


def test_access_at_the_threshold_keeps_a_copy(story: CacheStory) -> None:
    story.stores(FOUR, "a")
    reuses(story, "r", "a", FOUR)
    story.tell(changes("paper", 2, theta_reclaim=1.0))
    assert reclaims(story) == []
    story.tell(changes("paper", 3, theta_reclaim=1.1))
    assert [each.score for each in reclaims(story)] == [1.0]


def test_a_reclamation_ends_with_the_workers_report(story: CacheStory) -> None:
    story.stores(FOUR, "a b")
    story.tell(*reclaims(story))
    assert settle(story.state, story.now_ns, {}) == []
    story.evicts(FOUR, "b a")
    [gone] = settle(story.state, story.now_ns, {})
    assert gone == ReplicaReclaimed(operation="reclaim-1-1", z=block("b"), worker=FOUR, blocks=0), "by itself"
    story.tell(gone)
    assert not story.state.operations.reclaiming
    assert reclaims(story) == []


def test_what_went_before_its_reclamation_was_stored_is_reclaimed(story: CacheStory) -> None:
    story.stores(FOUR, "a")
    asked = reclaims(story)
    story.evicts(FOUR, "a")
    story.tell(*asked)
    assert [type(each) for each in settle(story.state, story.now_ns, {})] == [ReplicaReclaimed]


def test_a_replica_in_use_stays(story: CacheStory) -> None:
    story.stores(FOUR, "a")
    story.tell(*reclaims(story))
    [kept] = settle(story.state, story.now_ns, {"reclaim-1-1": "pinned"})
    assert kept == ReclamationFailed(operation="reclaim-1-1", z=block("a"), worker=FOUR, reason="pinned")
    story.wait(RECLAIM_S_MAX + 0.1)
    [silent] = settle(story.state, story.now_ns, {})
    assert silent.reason == "took longer than 5 s"


def test_a_reclamation_that_fails_is_not_asked_for_by_every_scan(story: CacheStory) -> None:
    story.stores(FOUR, "a")
    chosen = []
    for number in range(REST_SCANS + 2):
        reuses(story, f"r{number}", "", ONE)  # without anything new there would be no scan
        found = scan(story.state)
        story.tell(*found)
        chosen += [each.operation for each in found if isinstance(each, ReclamationRequested)]
        story.tell(*settle(story.state, story.now_ns, dict.fromkeys(chosen, "pinned")))
    assert chosen == ["reclaim-1-1", f"reclaim-{REST_SCANS + 2}-1"]
    assert len(story.state.operations.resting) == 1


def test_a_worker_that_starts_over_has_reclaimed_everything(story: CacheStory) -> None:
    story.stores(FOUR, "a")
    story.tell(*reclaims(story))
    story.tell(CacheReported(worker=FOUR, incarnation=1, number=9, part=1, parts=1, runs=()))
    assert [type(each) for each in settle(story.state, story.now_ns, {})] == [ReplicaReclaimed]


# --- by regret


def candidate(worker: str, degree: int, queue_us: int, cached_tokens: int, tokens: int) -> PricedCandidate:
    """Priced with β 1 and λ 0: E_C of the rest, after the queue."""
    uncached = tokens - cached_tokens
    service_us = 1_000 * uncached + 100 * cached_tokens + 4_000 * uncached // degree
    return PricedCandidate(
        worker=WorkerId(worker),
        degree=degree,
        cached_tokens=cached_tokens,
        queue_us=queue_us,
        service_us=service_us,
        occupancy_us=0,
        price_us=queue_us + service_us,
    )


def regretted(story: CacheStory, request: str, names: str, *candidates: PricedCandidate) -> None:
    tokens = 100 * len(names.split()) + 50
    story.receives(request, names, tokens)
    winner = candidates[0]
    event = assigned(request, winner.worker, tokens - winner.cached_tokens, winner.cached_tokens, degree=winner.degree)
    story.tell(event.model_copy(update={"candidates": candidates}), completed(request, winner.worker, 1))


def test_regret_is_what_the_best_worker_would_have_saved(story: CacheStory) -> None:
    story.tell(changes("regret", 2))
    story.stores(ONE, "a b")
    near, far = candidate(ONE, 1, 800_000, 200, 250), candidate(FOUR, 4, 0, 0, 250)
    assert (near.price_us, far.price_us) == (1_070_000, 500_000)
    event = assigned("r", FOUR, 250, degree=4).model_copy(update={"candidates": (far, near)})
    # With 200 tokens cached FOUR would have needed 50 + 20 + 50 ms.
    assert regret(story.state.coefficients, event, 200) == (FOUR, 4, 500_000 - 120_000)
    assert regret(story.state.coefficients, event.model_copy(update={"beta": 0.0}), 200) is None
    regretted(story, "r", "a b", far, near)
    assert [story.demand(name, 4)[1] for name in "ab"] == [pytest.approx(0.19), pytest.approx(0.19)]
    assert story.demand("a", 1)[1] == 0


def test_a_copy_is_worth_its_price_once_the_prefix_was_seen_three_times(story: CacheStory) -> None:
    story.tell(changes("regret", 2))
    story.stores(ONE, "a b")
    far, near = candidate(FOUR, 4, 0, 0, 250), candidate(ONE, 1, 800_000, 200, 250)
    for number in range(2):
        regretted(story, f"r{number}", "a b", far, near)
    assert copies(story) == []
    regretted(story, "r2", "a b", far, near)
    waits(story, "w", FOUR, 1_000)
    [asked] = copies(story)
    assert (asked.kind, asked.degree, asked.destination) == ("inter", 4, OTHER_FOUR), "the least loaded of the degree"
    before = story.demand("b", 4)[1]
    story.tell(asked)
    assert story.demand("b", 4)[1] == pytest.approx(before / 2), "half of it is answered"


@pytest.mark.parametrize(("engine", "way"), [("torch", "read"), ("sglang", "computed")])
def test_a_copy_that_is_computed_must_have_lost_more_than_it_costs(engine: str, way: str) -> None:
    """200 tokens at degree 4 take 400 ms. Each request has lost 50: it takes 170 at degree 2, and 120 had FOUR held them."""
    story = CacheStory()
    for node, composition in (("n0", (1, 1, 2)), ("n1", (4,)), ("n2", (4,))):
        first, *others = serving(node, composition)
        assert isinstance(first, NodeRegistered)
        story.tell(first.model_copy(update={"engine": engine, "kv_layout": "replicated"}), *others)
    story.tell(changes("regret"))
    story.stores(TWO, "a b")
    near, far = candidate(TWO, 2, 0, 200, 250), candidate(FOUR, 4, 0, 0, 250)
    for number in range(4):
        regretted(story, f"r{number}", "a b", near, far)
    assert [each.way for each in copies(story)] == ([] if way == "computed" else ["read"])
    for number in range(4, 12):
        regretted(story, f"r{number}", "a b", near, far)
    assert [each.way for each in copies(story)] == [way]


def test_no_regret_without_a_cheaper_worker(story: CacheStory) -> None:
    story.tell(changes("regret", 2))
    story.stores(ONE, "a b")
    holder = candidate(ONE, 1, 0, 200, 250)
    for number in range(5):
        regretted(story, f"r{number}", "a b", holder, candidate(FOUR, 4, 900_000, 0, 250))
    assert copies(story) == []


def test_regret_reclaims_only_second_copies_in_full_caches_that_stayed_cold(story: CacheStory) -> None:
    """However many older single copies there are: here 300, of which a scan looks at 256."""
    story.tell(changes("regret", 2))
    for number in range(300):
        story.stores(ONE, f"alone-{number}")
    names = [f"{number}" for number in range(3_700)]
    story.stores(FOUR, " ".join(names))
    story.stores(OTHER_FOUR, " ".join(names[:-1]))
    assert reclaims(story) == [], "the tip has one copy"
    story.stores(OTHER_FOUR, names[-1], below=names[-2])
    assert reclaims(story) == [], "and then two, but it is new"
    for number in range(1, 62):
        story.tell(CacheScanCompleted(
            scan=number, to_seq=1, nodes=0, holders=0, inter_candidates=0, intra_candidates=0, reclaim_candidates=0
        ))  # fmt: skip
    story.stores(ONE, "a")  # or nothing has happened since the last scan
    [found] = reclaims(story)
    assert (found.z, found.worker) == (block(names[-1]), OTHER_FOUR)
    for node in story.state.pool.nodes.values():
        assert node.spec is not None
        node.spec = node.spec.model_copy(update={"evicts": False})
    assert reclaims(story) == [], "an engine that would refuse is not asked, again and again"


def test_events_of_an_operation_are_told_apart_by_their_correlation(story: CacheStory) -> None:
    story.stores(FOUR, "a b")
    story.tell(*reclaims(story))
    run = b"".join(map(block, "ba"))
    evicted = BlocksEvicted(worker=FOUR, incarnation=1, number=2, cause="reclaim", block_ids=run)
    story.tell(evicted, correlation="reclaim-1-1")
    [gone] = settle(story.state, story.now_ns, {})
    assert gone.blocks == 2
    assert BlockRun(block_ids=run).block_ids == run
