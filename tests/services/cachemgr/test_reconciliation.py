"""What the workers of a coming epoch start with: certain, assigned and pending blocks, by hand and over random trees."""

from collections.abc import Mapping

from cache_world import CacheStory, block, chain
from hypothesis import given
from hypothesis import strategies as st

from services.cachemgr.assigning import assign
from services.cachemgr.decider import reconcile_placements
from shared.contracts.events import EpochAborted, NodeLost, ReconfigurationPlanned
from shared.contracts.ids import BlockId, NodeId, WorkerId
from shared.model.lattice import Composition
from tests.support.story import adopted, committed, prefilled, serving

N0 = NodeId("n0")


def switch(story: CacheStory, epoch: int, old: Composition, new: Composition, commit: bool = True) -> None:
    """One reconfiguration of n0 as the cache manager sees it, to its commit if that comes."""
    plan = ReconfigurationPlanned(
        node=N0,
        epoch=epoch,
        policy="paper",
        reason="x",
        old_composition=old,
        new_composition=new,
        retiring=(),
        coming=(),
    )
    story.tell(plan, *adopted("n0", epoch, ranks=sum(new)))
    story.tell(*reconcile_placements(story.state))
    if commit:
        story.tell(committed("n0", epoch, new))
    story.state.trie.check(story.state.holders)
    story.state.holders.check()


def reach(story: CacheStory, worker: str, names: str) -> int:
    """How many leading blocks the worker has with what is pending there."""
    held = story.state.holders.matched(chain(names)).get(WorkerId(worker), 0)
    return story.state.holders.pending.reaches(WorkerId(worker), chain(names), held)


def split_story(composition: Composition = (2,), new: Composition = (1, 1)) -> CacheStory:
    """n0/1/0 held `a b c`, `p q` and `x`; they were reused twice, four times and once."""
    story = CacheStory()
    story.tell(*serving("n0", composition))
    for names in ("a b c", "p q", "x"):
        story.stores("n0/1/0", names)
    for number, names in enumerate(("a b c", "a b c", "p q", "p q", "p q", "p q", "x")):
        story.receives(f"r{number}", names, 301)
        story.tell(prefilled(f"r{number}", "n0/1/0", 1, cached_own_tokens=300))
    switch(story, 2, composition, new)
    return story


def test_each_prefix_is_pending_at_one_child_by_demand() -> None:
    """Only `p q` was reused more than θ_intra times: it is both children's, and of the others each gets one."""
    story = split_story()
    assert [reach(story, worker, "p q") for worker in ("n0/2/0", "n0/2/1")] == [2, 2]
    assert [reach(story, worker, "a b c") for worker in ("n0/2/0", "n0/2/1")] == [3, 0]
    assert [reach(story, worker, "x") for worker in ("n0/2/0", "n0/2/1")] == [0, 1]
    assert story.state.holders.matched(chain("p q")) == {}, "nothing of it is credited"
    assert not story.state.trie.nodes[block("p")].replicas[0]


def test_a_prefill_ends_what_was_pending_on_its_path_and_nothing_else() -> None:
    story = split_story()
    story.receives("again", "p z", 201)
    story.tell(prefilled("again", "n0/2/0", 1))
    assert reach(story, "n0/2/0", "p q") == 0, "p is held or lost now, and its worker will say which"
    story.stores("n0/2/0", "p", cause="reconciliation")
    assert reach(story, "n0/2/0", "p q") == 2
    assert reach(story, "n0/2/1", "p q") == 2
    assert reach(story, "n0/2/0", "a b c") == 3


def test_a_second_switch_carries_what_is_pending() -> None:
    """A merge keeps it, for the blocks lie on the ranks of the merged worker but maybe below something that has gone; the same
    ranks keep it; a split of the rest assigns it again."""
    story = split_story((4,), (2, 2))
    before = {names: [reach(story, worker, names) for worker in ("n0/2/0", "n0/2/2")] for names in ("p q", "a b c")}
    assert before == {"p q": [2, 2], "a b c": [3, 0]}
    switch(story, 3, (2, 2), (1, 1, 2))
    assert sorted(reach(story, worker, "a b c") for worker in ("n0/3/0", "n0/3/1")) == [0, 3]
    assert reach(story, "n0/3/2", "p q") == 2, "its ranks stayed together"
    switch(story, 4, (1, 1, 2), (4,))
    assert [reach(story, "n0/4/0", names) for names in ("p q", "a b c", "x")] == [2, 3, 1]


def test_what_was_held_below_something_evicted_is_not_carried() -> None:
    story = split_story((4,), (2, 2))
    story.receives("again", "a", 101)
    story.tell(prefilled("again", "n0/2/0", 1))
    assert reach(story, "n0/2/0", "a b c") == 0
    switch(story, 3, (2, 2), (1, 1, 2))
    assert [reach(story, worker, "a b c") for worker in ("n0/3/0", "n0/3/1")] == [0, 0]


def test_an_abort_leaves_what_was_pending_where_it_was() -> None:
    story = split_story((4,), (2, 2))
    switch(story, 3, (2, 2), (1, 1, 2), commit=False)
    story.tell(EpochAborted(node=N0, epoch=3, step="reconciling", reason="x"))
    assert reach(story, "n0/2/0", "a b c") == 3


def test_a_node_that_is_lost_has_nothing_pending() -> None:
    story = split_story()
    story.tell(NodeLost(node=N0, incarnation=1, reason="rank died"))
    assert not story.state.holders.pending.of_worker


def test_no_metadata_of_one_child_takes_the_room_of_the_others(monkeypatch) -> None:
    from services.cachemgr import reconciliation

    monkeypatch.setattr(reconciliation, "METADATA_BYTES_MAX", 2 * (90 + 2 * 22))
    story = split_story()
    assert [reach(story, worker, "p q") for worker in ("n0/2/0", "n0/2/1")] == [2, 2]
    assert [reach(story, worker, "a b c") for worker in ("n0/2/0", "n0/2/1")] == [0, 0]


# --- assigning


def tree(names: str) -> dict[BlockId, BlockId | None]:
    """`"a b<a c<b x"`: blocks with their parents."""
    pairs = [[*each.split("<"), ""][:2] for each in names.split()]
    return {block(name): block(parent) if parent else None for name, parent in pairs}


def test_the_least_demanded_child_with_room_for_all_of_it() -> None:
    asked = {block(name): demand for name, demand in {"a": 2.0, "b": 2.0, "p": 1.5, "q": 1.5, "x": 0.5}.items()}
    first, second = assign(tree("x p q<p a b<a"), asked.__getitem__, 9.0, (3, 2))
    assert list(first) == chain("a b x"), "4.0 of demand, and alone has room for a third block"
    assert list(second) == chain("p q")


def test_what_fits_nowhere_goes_where_most_room_is_from_the_top() -> None:
    first, second = assign(tree("a b<a c<b d<c"), lambda _: 1.0, 9.0, (1, 3))
    assert (list(first), list(second)) == ([], chain("a b c"))


def test_what_nobody_asked_for_is_shared_out_by_room() -> None:
    parts = assign(tree("a b p q"), lambda _: 0.0, 2.0, (4, 4))
    assert [len(part) for part in parts] == [2, 2]


def test_a_hot_block_below_a_cold_one_is_not_for_all() -> None:
    first, second = assign(tree("a b<a"), lambda each: 5.0 if each == block("b") else 1.0, 2.0, (9, 9))
    assert (list(first), list(second)) == (chain("a b"), [])


@given(
    st.lists(st.tuples(st.integers(-1, 30), st.floats(0, 4)), max_size=40),
    st.lists(st.integers(0, 25), min_size=2, max_size=4),
)
def test_every_child_s_part_is_prefix_closed_within_its_room_and_nothing_is_lost_for_want_of_trying(
    shape: list[tuple[int, float]], rooms: list[int]
) -> None:
    ids = [block(f"n{number}") for number in range(len(shape))]
    parents = {
        each: ids[above] if 0 <= above < number else None
        for number, (each, (above, _)) in enumerate(zip(ids, shape, strict=True))
    }
    asked: Mapping[BlockId, float] = {each: demand for each, (_, demand) in zip(ids, shape, strict=True)}
    parts = assign(parents, asked.__getitem__, 2.0, rooms)
    for part, room in zip(parts, rooms, strict=True):
        assert len(part) <= room
        assert all(parent is None or parent in part for parent in part.values())
        assert all(parents[each] == parent for each, parent in part.items())
    if all(room >= len(ids) for room in rooms):
        everything = set().union(*parts)
        assert everything == set(ids)
        twice = {each for each in ids if sum(each in part for part in parts) > 1}
        assert all(asked[each] > 2.0 for each in twice), "only what is hot is given twice"
