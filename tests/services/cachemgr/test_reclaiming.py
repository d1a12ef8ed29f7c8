"""What a scan gives up, by hand. n0 has workers of degree 1, 1 and 2, n1 and n2 one of degree 4. Blocks have 100 tokens."""

import pytest
from cache_world import (
    FOUR,
    ONE,
    OTHER_FOUR,
    OTHER_ONE,
    ROUND,
    CacheStory,
    block,
    changes,
    copies,
    misses,
    paper_pool,
    pool,
    reclaims,
    reuses,
)

from services.cachemgr import reclaiming
from services.cachemgr.decider import initial, scan, settle
from services.cachemgr.reclamation import RECLAIM_S_MAX, order
from services.cachemgr.replication import REST_SCANS
from shared.contracts.copy_commands import Evict
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlockRun,
    BlocksEvicted,
    CacheReported,
    CacheScanCompleted,
    Cordoned,
    Frozen,
    ReclamationFailed,
    ReclamationRequested,
    ReplicaReclaimed,
    Thawed,
    Uncordoned,
)
from shared.contracts.ids import node_of


@pytest.fixture
def story() -> CacheStory:
    return paper_pool()


def places(story: CacheStory) -> list[tuple[bytes, str, int]]:
    return [(each.z, each.worker, each.blocks) for each in reclaims(story)]


def fades(story: CacheStory, scans: int) -> None:
    """Scans that choose nothing pass."""
    for _ in range(scans):
        story.tell(CacheScanCompleted(
            scan=story.state.trie.scan + 1, to_seq=1, nodes=0, holders=0, inter_candidates=0, intra_candidates=0,
            reclaim_candidates=0,
        ))  # fmt: skip


# --- what may go


def test_a_cold_copy_goes_where_nothing_below_it_is_held_though_others_hold_more(story: CacheStory) -> None:
    story.stores(FOUR, "a b c")
    story.stores(OTHER_FOUR, "a b c x y")
    # c ends what FOUR has. At OTHER_FOUR, the fuller one, x is below c, and a to c go at one worker at a time.
    assert places(story) == [(block("c"), FOUR, 3), (block("y"), OTHER_FOUR, 2)]
    story.tell(*reclaims(story))
    assert places(story) == [], "all of it is under way"
    going = story.state.operations.reclaiming
    assert [order(each, story.state.trie, 3) for each in going.values()] == [
        Evict(term=3, operation="reclaim-1-1", worker=FOUR, block_ids=b"".join(map(block, "abc"))),
        Evict(term=3, operation="reclaim-1-2", worker=OTHER_FOUR, block_ids=b"".join(map(block, "xy"))),
    ]
    story.evicts(FOUR, "c b a")
    story.evicts(OTHER_FOUR, "y x")
    story.tell(*settle(story.state, story.now_ns, {}))
    assert places(story) == [(block("c"), OTHER_FOUR, 3)]


def test_of_two_copies_one_stays_where_one_is_wanted(story: CacheStory) -> None:
    for worker in (FOUR, OTHER_FOUR):
        story.stores(worker, "a b")
    reuses(story, "r", "a b", FOUR)
    fades(story, 4)  # 0.41 accesses are too few for two copies, and enough for one
    assert places(story) == [(block("b"), OTHER_FOUR, 2)], "of equally full caches that with the higher id"
    story.tell(*reclaims(story))
    assert places(story) == [], "b is given up once at a time"
    story.evicts(OTHER_FOUR, "b a")
    story.tell(*settle(story.state, story.now_ns, {}))
    assert places(story) == []


def test_what_goes_as_an_ancestor_does_not_go_elsewhere_too(story: CacheStory) -> None:
    story.stores(FOUR, "a b x")
    story.stores(OTHER_FOUR, "a b y")
    reuses(story, "r", "a b", FOUR)
    fades(story, 4)
    # x and y were never asked for. With x, a and b go as the second copies that nobody wants; with y they would be the last.
    assert places(story) == [(block("x"), FOUR, 3), (block("y"), OTHER_FOUR, 1)]


def test_an_ancestor_stays_that_holds_up_another_branch_there(story: CacheStory) -> None:
    story.stores(FOUR, "a b")
    story.stores(FOUR, "c", below="a")
    story.stores(ONE, "a d")
    assert places(story) == [(block("b"), FOUR, 1), (block("c"), FOUR, 1), (block("d"), ONE, 2)]
    story.evicts(FOUR, "c")
    assert places(story) == [(block("b"), FOUR, 2), (block("d"), ONE, 2)], "as soon as it holds up one"


def test_each_degree_has_demand_and_copies_of_its_own(story: CacheStory) -> None:
    for worker in (ONE, FOUR):
        story.stores(worker, "a")
    reuses(story, "r", "a", FOUR)
    assert places(story) == [(block("a"), ONE, 1)]


# --- in which order


def test_the_least_wanted_per_copy_goes_first_however_long_ago_others_were_asked_for(story: CacheStory) -> None:
    for number in range(20):
        story.stores(FOUR, f"old{number}")
        reuses(story, f"o{number}", f"old{number}", FOUR)
    for name in ("twice", "once", "thrice", "never"):
        story.stores(FOUR, name)
    story.stores(OTHER_FOUR, "thrice")
    for request, name in enumerate(("twice", "twice", "thrice", "thrice", "thrice", "once")):
        reuses(story, f"r{request}", name, FOUR)
    fades(story, 1)
    story.tell(changes("paper", 2, theta_reclaim=1.9, cache_operations_max=1))
    assert [(each.z, each.score) for each in reclaims(story)] == [(block("never"), 0)]
    story.evicts(FOUR, "never")
    story.tell(changes("paper", 3, cache_operations_max=32))
    order_of = [(each.z, each.score) for each in reclaims(story)]
    assert order_of[:20] == [(block(f"old{number}"), 0.8) for number in range(20)], "of equals the oldest"
    assert order_of[20:] == [(block("once"), 0.8), (block("thrice"), pytest.approx(1.2)), (block("twice"), 1.6)]


def test_the_fullest_cache_gives_it_up(story: CacheStory) -> None:
    for worker in (OTHER_FOUR, FOUR):
        story.stores(worker, "a")
    assert places(story) == [(block("a"), OTHER_FOUR, 1)], "the higher id of equals"
    story.stores(FOUR, "p q")
    reuses(story, "r", "p q", FOUR)
    assert places(story) == [(block("a"), FOUR, 1)]
    story.tell(Cordoned(node=node_of(FOUR), asked_by="ann", reason=""))
    assert places(story) == [(block("a"), OTHER_FOUR, 1)], "a worker that nothing is asked of"


def test_where_it_could_not_go_lately_another_holder_gives_it_up(story: CacheStory) -> None:
    for worker in (FOUR, OTHER_FOUR):
        story.stores(worker, "a")
    story.tell(*reclaims(story))
    story.tell(*settle(story.state, story.now_ns, {"reclaim-1-1": "pinned"}))
    assert places(story) == [(block("a"), FOUR, 1)]


def test_what_nobody_can_give_up_is_in_nobodys_way(story: CacheStory) -> None:
    """A scan looks at 256 cold pairs for the 16 that it may choose, and these 300 are colder than the others."""
    for number in range(300):
        story.stores(FOUR, f"old{number}")
    story.stores(OTHER_FOUR, "a")
    story.tell(Cordoned(node=node_of(FOUR), asked_by="ann", reason=""))
    assert places(story) == [(block("a"), OTHER_FOUR, 1)]
    story.tell(Uncordoned(node=node_of(FOUR), asked_by="ann", reason=""))
    assert {worker for _, worker, _ in places(story)} == {FOUR}
    node = story.state.pool.nodes[node_of(FOUR)]
    assert node.spec is not None
    node.spec = node.spec.model_copy(update={"evicts": False})
    assert places(story) == [(block("a"), OTHER_FOUR, 1)]


def chosen_by(story: CacheStory, rules: int) -> list[tuple[bytes, str]]:
    return [(each.z, each.worker) for each in scan(story.state, rules) if isinstance(each, ReclamationRequested)]


def test_a_scan_goes_on_behind_what_the_last_one_passed_over_in_vain(
    story: CacheStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan passes over three pairs at most, and there are seven at a cordoned node."""
    monkeypatch.setattr(reclaiming, "KEPT_MAX", 3)
    for number in range(7):
        story.stores(FOUR, f"old{number}")
    story.stores(OTHER_FOUR, "a")
    story.tell(Cordoned(node=node_of(FOUR), asked_by="ann", reason=""))
    for passed in (3, 3):
        assert chosen_by(story, 2) == []
        done, *chosen = scan(story.state)
        assert isinstance(done, CacheScanCompleted)
        assert (done.passed, chosen) == (passed, [])
        story.tell(done)
        story.stores(ONE, f"new{done.scan}", below=None)  # or nothing has happened since
        story.evicts(ONE, f"new{done.scan}")
    done, found = scan(story.state)
    assert isinstance(done, CacheScanCompleted)
    assert isinstance(found, ReclamationRequested)
    assert (found.z, found.worker, done.passed) == (block("a"), OTHER_FOUR, 4), "nor did it find more than this one"
    story.state.trie.check(story.state.holders)
    story.tell(done, Uncordoned(node=node_of(FOUR), asked_by="ann", reason=""))
    assert len(places(story)) == 8


def test_a_scan_that_finds_enough_begins_at_the_same_place_again(
    story: CacheStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaiming, "KEPT_MAX", 2)
    story.tell(changes("paper", 2, cache_operations_max=1))
    for worker, names in ((FOUR, ("a", "b")), (OTHER_FOUR, ("c", "d", "e"))):
        for name in names:
            story.stores(worker, name)
    story.tell(Cordoned(node=node_of(OTHER_FOUR), asked_by="ann", reason=""))
    done, found = scan(story.state)
    assert isinstance(done, CacheScanCompleted)
    assert isinstance(found, ReclamationRequested)
    assert (found.z, done.passed) == (block("a"), 0)


@pytest.mark.parametrize("rules", [2, 3])
def test_what_rests_does_not_hide_what_could_go(story: CacheStory, rules: int) -> None:
    """A scan that may choose one looks at 16; these 20 are colder, and their agent keeps them."""
    story.tell(changes("paper", 2, cache_operations_max=1))
    for number in range(20):
        story.stores(FOUR, f"kept{number}")
        story.state.operations.resting[block(f"kept{number}"), FOUR] = REST_SCANS
    story.stores(OTHER_FOUR, "a")
    assert chosen_by(story, rules) == ([] if rules == 2 else [(block("a"), OTHER_FOUR)])


@pytest.mark.parametrize("rules", [2, 3])
def test_second_copies_in_caches_with_room_do_not_hide_those_in_full_ones(story: CacheStory, rules: int) -> None:
    """By regret; of 300 colder ones a scan looks at 256."""
    story.tell(changes("regret", 2))
    for number in range(300):
        for worker in (ONE, OTHER_ONE):
            story.stores(worker, f"roomy{number}")
    names = " ".join(f"{number}" for number in range(3_700))
    for worker in (FOUR, OTHER_FOUR):
        story.stores(worker, names)
    fades(story, 61)
    story.stores(ONE, "a")
    assert chosen_by(story, rules) == ([] if rules == 2 else [(block("3699"), OTHER_FOUR)])


@pytest.mark.parametrize(
    "ends", [Uncordoned(node=node_of(FOUR), asked_by="ann", reason=""), Thawed(asked_by="ann", reason="")]
)
def test_what_may_go_again_goes_though_nothing_else_happens(story: CacheStory, ends: EventData) -> None:
    story.stores(FOUR, "a")
    story.tell(
        Cordoned(node=node_of(FOUR), asked_by="ann", reason="")
        if isinstance(ends, Uncordoned)
        else Frozen(asked_by="ann", reason="")
    )
    story.tell(*scan(story.state))
    assert scan(story.state) == []
    story.tell(ends)
    assert places(story) == [(block("a"), FOUR, 1)]


# --- beside copies


def test_what_a_copy_reads_stays_and_the_rest_of_that_worker_does_not(story: CacheStory) -> None:
    story.stores(ONE, "a b c")
    story.stores(ONE, "p")
    for number in range(2):
        misses(story, f"r{number}", "a b", 4)
    [copy] = copies(story)
    assert (copy.z, copy.sources) == (block("b"), (ONE,))
    expected = [(block("c"), ONE, 1), (block("p"), ONE, 1)]
    assert places(story) == expected, "of the same scan"
    story.tell(copy)
    assert places(story) == expected, "or under way"


def test_what_a_copy_goes_on_from_at_its_destination_stays(story: CacheStory) -> None:
    story.stores(ONE, "a b")
    story.stores(FOUR, "a")
    story.stores(OTHER_FOUR, "a")
    for number in range(2):
        misses(story, f"r{number}", "a b", 4)
    [copy] = copies(story)
    assert (copy.z, copy.destination, copy.first_depth) == (block("b"), FOUR, 1)
    assert places(story) == [(block("a"), OTHER_FOUR, 1)]


# --- as it was


def test_scans_of_before_gave_up_only_what_nobody_held_anything_below() -> None:
    story = CacheStory(initial(ROUND, derives=True))
    story.tell(*pool(), changes("paper"))
    story.stores(FOUR, "a b c")
    story.stores(OTHER_FOUR, "a b c x y")
    done, *found = scan(story.state, rules=1)
    assert isinstance(done, CacheScanCompleted)
    assert done.rules == 1
    assert [(each.z, each.worker, each.blocks) for each in found] == [(block("y"), OTHER_FOUR, 5)]
    story.tell(*found)
    assert scan(story.state, rules=1)[1:] == [], "it is under way"
    story.state.trie.check(story.state.holders)


# --- paths and ends


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
    fades(story, 61)
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
