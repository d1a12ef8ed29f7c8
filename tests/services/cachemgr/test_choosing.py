"""What a scan asks for, by hand. n0 has workers of degree 1, 1 and 2, n1 and n2 one of degree 4. Blocks have 100 tokens."""

import pytest
from cache_world import (
    FOUR,
    ONE,
    OTHER_FOUR,
    TWO,
    CacheStory,
    block,
    changes,
    copies,
    misses,
    paper_pool,
    reclaims,
    reuses,
)

from services.cachemgr.decider import scan, settle
from services.cachemgr.regret import regret
from services.cachemgr.replication import REST_SCANS
from shared.contracts.events import (
    CacheScanCompleted,
    Cordoned,
    Frozen,
    NodeRegistered,
    PricedCandidate,
    ReplicationRequested,
)
from shared.contracts.ids import NodeId, WorkerId, node_of
from tests.support.story import assigned, completed, serving


@pytest.fixture
def story() -> CacheStory:
    return paper_pool()


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


def runs(story: CacheStory, engine: str, *nodes: str) -> None:
    """What these nodes run, from the beginning."""
    for each in nodes:
        node = story.state.pool.nodes[NodeId(each)]
        assert node.spec is not None
        node.spec = node.spec.model_copy(update={"engine": engine})


@pytest.mark.parametrize(("ours", "theirs"), [("torch", "sglang"), ("sglang", "torch")])
def test_a_copy_is_read_from_a_worker_of_its_own_engine(story: CacheStory, ours: str, theirs: str) -> None:
    runs(story, ours, "n0")
    runs(story, theirs, "n1", "n2")
    story.stores(ONE, "a")
    for number in range(2):
        misses(story, f"r{number}", "a", 4)
    assert copies(story) == [], "nobody of degree 4 can read what ONE has"
    runs(story, ours, "n2")
    [asked] = copies(story)
    assert (asked.sources, asked.destination) == ((ONE,), OTHER_FOUR)
    story.stores(TWO, "a")
    runs(story, theirs, "n0")
    story.tell(*serving("n3", (1,)))
    runs(story, ours, "n3")
    story.stores("n3/1/0", "a")
    found = {each.destination: each.sources for each in copies(story)}
    assert found == {FOUR: (ONE, TWO)}, "the first of equals, and from its own kind alone"


def test_of_two_engines_the_one_that_has_the_prefix_gets_a_second_copy(story: CacheStory) -> None:
    story.tell(*serving("n3", (4,)))
    runs(story, "sglang", "n2")
    story.stores(FOUR, "a")
    for number in range(3):
        reuses(story, f"r{number}", "a", FOUR)
    waits(story, "w", "n3/1/0", 1_000)
    [asked] = copies(story)
    assert (asked.sources, asked.destination) == ((FOUR,), "n3/1/0"), "though OTHER_FOUR has nothing to do"


def test_copies_at_a_degree_that_cannot_be_read_are_made_from_those_of_another(story: CacheStory) -> None:
    story.tell(*serving("n3", (4,)))
    runs(story, "sglang", "n1", "n3")
    for worker in (ONE, FOUR):
        story.stores(worker, "a")
    for number in range(3):
        reuses(story, f"r{number}", "a", FOUR)
    [asked] = copies(story)
    assert (asked.kind, asked.sources, asked.destination) == ("intra", (ONE,), OTHER_FOUR)
    waits(story, "w", OTHER_FOUR, 1_000)
    [asked] = copies(story)
    assert (asked.sources, asked.destination) == ((FOUR,), "n3/1/0"), "the other engine's own"
    story.tell(Cordoned(node=NodeId("n1"), asked_by="ann", reason=""))
    assert copies(story)[0].sources == (FOUR,), "a node that takes nothing new is still read from"


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


@pytest.mark.parametrize(
    ("own_time", "price_us", "lost_us"), [(False, 2_250_000, 1_710_000), (True, 1_750_000, 1_330_000)]
)
def test_regret_counts_a_slow_worker_as_its_price_did(
    story: CacheStory, own_time: bool, price_us: int, lost_us: int
) -> None:
    """A ratio of 1.5 and β 3: of 250 tokens 0.5 s, of 50 with 200 cached 0.12 s."""
    story.tell(changes("regret", 2))
    slow = candidate(FOUR, 4, 0, 0, 250).model_copy(update={"ratio": 1.5, "service_us": 750_000, "price_us": price_us})
    update = {"candidates": (slow,), "beta": 3.0, "ratio_in_own_time": own_time}
    event = assigned("r", FOUR, 250, degree=4).model_copy(update=update)
    assert regret(story.state.coefficients, event, 200) == (FOUR, 4, lost_us)


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


def test_what_is_regretted_at_a_degree_is_read_from_another_if_its_copies_are_of_another_engine(
    story: CacheStory,
) -> None:
    story.tell(changes("regret", 2))
    runs(story, "sglang", "n1")
    for worker in (ONE, FOUR):
        story.stores(worker, "a b")
    far, near = candidate(OTHER_FOUR, 4, 0, 0, 250), candidate(ONE, 1, 800_000, 200, 250)
    for number in range(4):
        regretted(story, f"r{number}", "a b", far, near)
    assert [(each.sources, each.destination) for each in copies(story)] == [((ONE,), OTHER_FOUR)]


@pytest.mark.parametrize("rules", [2, 3])
@pytest.mark.parametrize("other", ["p q", "a b p q"])
def test_what_cannot_be_copied_does_not_hide_what_could(story: CacheStory, other: str, rules: int) -> None:
    """One copy a scan. What lost most, and is deepest, has just failed at both workers of the degree; `other` has a root of
    its own, or shares it."""
    story.tell(changes("regret", 2, cache_operations_max=1))
    story.stores(ONE, "a b c d e f")
    story.stores(ONE, other) if other[0] == "p" else story.stores(ONE, "p q", below="b")
    for number in range(6):
        names = "a b c d e f" if number % 2 else other
        tokens = 100 * len(names.split())
        far, near = candidate(FOUR, 4, 0, 0, tokens + 50), candidate(ONE, 1, 2_000_000, tokens, tokens + 50)
        regretted(story, f"r{number}", names, far, near)
    assert [each.z for each in copies(story)] == [block("f")]
    for worker in (FOUR, OTHER_FOUR):
        story.state.operations.resting[block("f"), worker] = REST_SCANS
    found = [each.z for each in scan(story.state, rules) if isinstance(each, ReplicationRequested)]
    assert found == ([] if rules == 2 else [block("q")])


def test_no_regret_without_a_cheaper_worker(story: CacheStory) -> None:
    story.tell(changes("regret", 2))
    story.stores(ONE, "a b")
    holder = candidate(ONE, 1, 0, 200, 250)
    for number in range(5):
        regretted(story, f"r{number}", "a b", holder, candidate(FOUR, 4, 900_000, 0, 250))
    assert copies(story) == []
