"""A state that was written and read is the state, and goes on as it would have."""

import random
from copy import deepcopy

import pytest
from cache_world import ROUND, CacheStory, block
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cachemgr import decider, trie
from services.cachemgr.freezing import Folded, pieces, read
from shared.contracts.envelope import Stored
from shared.contracts.ids import Source
from shared.runtime.projection import Place, Reached
from shared.runtime.states import BadState
from tests.replay.lagging_world import World
from tests.support.story import assigned, prefilled, serving

REACHED = Reached(7, 3, 2, {"a": 7}, {Source("m-1"): Place(4, 6)})


def frozen(state: decider.State) -> bytes:
    return b"".join(pieces(Folded(state, REACHED, state.coefficients)))


def fold(events: list[Stored], state: decider.State | None = None) -> decider.State:
    state = state or decider.initial(ROUND)
    for each in events:
        decider.evolve(state, each)
    return state


def a_life(seed: int, steps: int) -> list[Stored]:
    """Caches that are filled and evicted, copies, lost nodes and routers, scans."""
    world = World(seed, policy="vertumnus")
    world.run(steps)
    world.lose_node("n1", 1)
    world.kill_router()
    world.run(steps // 4)
    world.bring_up("n1", 2, 2)
    world.join_router()
    world.run(steps)
    return world.log


def orders(state: decider.State) -> list[list[object]]:
    """What the fold goes through in its order."""
    nodes = state.trie
    return [list(each) for each in (nodes.nodes, nodes._hot, nodes._holderless, nodes.tips._all, nodes.tips._spare)]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_snapshot_and_the_tail_give_what_the_whole_log_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie, "HOLDERLESS_MAX", 40)
    log = a_life(seed, 200)
    whole = frozen(fold(log))
    for share in (0, 1, 3, 5, 7, 10):
        kept = len(log) * share // 10
        state = fold(log[:kept])
        read_back = read(frozen(state)).state
        assert frozen(read_back) == frozen(state)
        read_back.holders.check()
        read_back.trie.check(read_back.holders)
        assert orders(read_back) == orders(state)
        assert decider.scan(read_back) == decider.scan(state)
        assert frozen(fold(log[kept:], read_back)) == whole


def test_what_a_projection_knows_comes_along() -> None:
    folded = read(frozen(fold([])))
    assert (folded.reached, folded.began_with) == (REACHED, ROUND)
    assert folded.state.holders.watcher is folded.state.trie


steps = st.lists(
    st.tuples(
        st.sampled_from(("stores", "evicts", "asks", "scans")),
        st.sampled_from(("n0/1/0", "n0/1/1", "n0/1/2")),
        st.sampled_from(("a b c d", "a b x y", "a b c q", "p q2", "r")),
        st.integers(1, 4),
    ),
    max_size=40,
)


@given(steps=steps, cut=st.integers(0, 40))
@settings(max_examples=60)
def test_any_story_goes_on_from_any_place(steps: list[tuple[str, str, str, int]], cut: int) -> None:
    whole, halved = CacheStory(), CacheStory()
    for story in (whole, halved):
        story.tell(*serving("n0", (1, 1, 2)))
    for number, (what, worker, names, depth) in enumerate(steps):
        if number == cut:
            halved.state = read(frozen(halved.state)).state
            halved._fold = lambda stored: decider.evolve(halved.state, stored)
        for story in (whole, halved):
            some = " ".join(names.split()[:depth])
            match what:
                case "stores":
                    story.stores(worker, some)
                case "evicts":
                    story.evicts(worker, names.split()[min(depth, len(names.split())) - 1])
                case "asks":
                    story.receives(f"q{number}", names, 1_000)
                    story.tell(assigned(f"q{number}", worker, 900, 100, preferred_degree=(1, 2)[depth % 2]))
                    story.tell(prefilled(f"q{number}", worker, 1_000 - 100 * depth, cached_own_tokens=100 * depth))
                case "scans":
                    for found in decider.scan(story.state):
                        story.tell(found)
    assert frozen(halved.state) == frozen(whole.state)
    halved.state.trie.check(halved.state.holders)


def test_bytes_that_are_no_state_are_refused() -> None:
    story = CacheStory()
    story.tell(*serving("n0", (1, 1, 2)))
    story.stores("n0/1/0", "a b c")
    whole = frozen(story.state)
    assert block("b") in read(whole).state.trie.nodes
    chance = random.Random(0)
    for length in (0, 7, 8, 50, len(whole) // 2, len(whole) - 1):
        with pytest.raises(BadState):
            read(whole[:length])
    for _ in range(50):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(damaged))] ^= 255
        try:
            read(bytes(damaged))
        except BadState:
            continue
    assert frozen(deepcopy(story.state)) == whole
