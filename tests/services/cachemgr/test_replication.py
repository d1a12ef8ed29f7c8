"""One copy from request to report, and what a switch leaves usable."""

import pytest
from cache_world import CacheStory, block, chain

from services.cachemgr.decider import reconcile_placements
from services.cachemgr.reconciliation import runs_of
from services.cachemgr.replication import COPY_S_MAX, Wish, order, request, settle
from shared.contracts.copy_commands import (
    Copy,
)
from shared.contracts.events import (
    BlockRun,
    BlocksStored,
    Cordoned,
    EpochAborted,
    NodeLost,
    ReconfigurationPlanned,
    ReplicaInstalled,
    ReplicationFailed,
    ReplicationRequested,
    Uncordoned,
)
from shared.contracts.ids import NodeId, WorkerId
from shared.model.lattice import Composition
from tests.support.story import adopted, committed, serving

ONE, FOUR = WorkerId("n0/1/0"), WorkerId("n1/1/0")
WISH = Wish("op-1", block("c"), 4, "inter", (ONE,), FOUR, 0.4)


@pytest.fixture
def story() -> CacheStory:
    told = CacheStory()
    told.tell(*serving("n0", (1, 1)), *serving("n1", (4,)))
    told.stores(ONE, "a b c")
    told.stores(FOUR, "a")
    return told


def requested(story: CacheStory, wish: Wish = WISH) -> list:
    state = story.state
    return request(state.operations, state.trie, state.holders, state.pool, wish)


def settled(story: CacheStory) -> list:
    return settle(story.state.operations.open["op-1"], story.state.pool, story.now_ns)


def test_a_copy_from_request_to_installation(story: CacheStory) -> None:
    [asked] = requested(story)
    assert asked == ReplicationRequested(
        operation="op-1",
        z=block("c"),
        degree=4,
        kind="inter",
        sources=(ONE,),
        destination=FOUR,
        first_depth=1,
        blocks=2,
        score=0.4,
    )
    story.tell(asked)
    assert requested(story) == [], "it is under way"
    assert requested(story, WISH._replace(operation="op-2")) == [], "under whatever name"
    assert settled(story) == []
    operation = story.state.operations.open["op-1"]
    assert order(operation, story.state.trie, 3) == Copy(
        term=3,
        operation="op-1",
        source=ONE,
        destination=FOUR,
        parent=block("a"),
        block_ids=b"".join(chain("b c")),
        deadline_us=10_000_000,
    )

    story.wait(0.5)
    story.stores(FOUR, "b", below="a")
    assert settled(story) == [], "a part is not the prefix"
    story.stores(FOUR, "c", below="b")
    assert order(operation, story.state.trie, 3) is None
    story.wait(60)
    story.stores(FOUR, "x", below="c")  # something else, much later
    [installed] = settled(story)
    assert installed == ReplicaInstalled(operation="op-1", z=block("c"), destination=FOUR, blocks=2, copy_us=500_000)
    story.tell(installed)
    assert not story.state.operations.open
    assert requested(story) == [], "it is there"
    assert story.state.trie.nodes[block("c")].replicas == (1, 0, 1, 0)


def test_a_whole_path_is_copied_below_the_root(story: CacheStory) -> None:
    story.evicts(FOUR, "a")
    story.tell(*requested(story))
    command = order(story.state.operations.open["op-1"], story.state.trie, 1)
    assert (command.parent, command.block_ids) == (None, b"".join(chain("a b c")))


def test_what_the_destination_had_before_the_request_was_stored_is_installed(story: CacheStory) -> None:
    asked = requested(story)
    story.stores(FOUR, "b c", below="a")
    story.tell(*asked)
    assert [type(each) for each in settled(story)] == [ReplicaInstalled]


def test_a_copy_that_takes_too_long_has_failed(story: CacheStory) -> None:
    story.tell(*requested(story))
    story.wait(COPY_S_MAX)
    assert settled(story) == []
    story.wait(0.1)
    [failed] = settled(story)
    assert failed == ReplicationFailed(operation="op-1", z=block("c"), destination=FOUR, reason="took longer than 10 s")
    story.tell(failed)
    assert not story.state.operations.open
    assert requested(story) != [], "it may be tried again"


@pytest.mark.parametrize("fact", [NodeLost(node=NodeId("n1"), incarnation=1, reason="x"), committed("n1", 2, (2, 2))])
def test_a_destination_that_is_gone_has_failed(story: CacheStory, fact) -> None:
    story.tell(*requested(story), fact)
    assert [each.reason for each in settled(story)] == ["destination-lost"]


@pytest.mark.parametrize(
    "wish",
    [
        WISH._replace(z=block("zz")),
        WISH._replace(sources=(WorkerId("n0/1/1"),)),
        WISH._replace(destination=WorkerId("n9/1/0")),
        WISH._replace(z=block("a")),
    ],
    ids=["unknown prefix", "no source", "unknown destination", "held already"],
)
def test_an_impossible_copy_is_not_requested(story: CacheStory, wish: Wish) -> None:
    assert requested(story, wish) == []


def test_nothing_is_copied_from_whom_nobody_believes_or_to_where_nobody_is_sent(story: CacheStory) -> None:
    story.tell(Cordoned(node=NodeId("n1"), asked_by="me"))
    assert requested(story) == []
    story.tell(Uncordoned(node=NodeId("n1"), asked_by="me"))
    assert requested(story) != []
    run = BlockRun(block_ids=b"".join(chain("a b c")))
    story.tell(BlocksStored(worker=ONE, incarnation=2, number=1, cause="fetch", blocks=3, runs=(run,)))
    assert story.state.holders.trust(ONE) == "blind"
    assert requested(story) == []


# --- reconciliation


def planned(node: str, old: Composition, new: Composition) -> ReconfigurationPlanned:
    return ReconfigurationPlanned(
        node=NodeId(node),
        epoch=2,
        policy="paper",
        reason="x",
        old_composition=old,
        new_composition=new,
        retiring=(),
        coming=(),
    )


def usable(story: CacheStory, names: str, worker: str) -> int:
    return story.state.holders.matched(chain(names)).get(WorkerId(worker), 0)


def switched(story: CacheStory, node: str, old: Composition, new: Composition) -> None:
    """One reconfiguration as the cache manager sees it."""
    ranks = sum(new)
    story.tell(planned(node, old, new))
    assert reconcile_placements(story.state) == []
    story.tell(*adopted(node, 2, ranks=ranks - 1))
    assert reconcile_placements(story.state) == [], "one rank has not adopted"
    story.tell(adopted(node, 2, ranks=ranks)[-1])
    story.tell(*reconcile_placements(story.state))
    assert reconcile_placements(story.state) == []
    story.tell(committed(node, 2, new))
    story.state.trie.check(story.state.holders)


def test_a_merge_keeps_what_either_sibling_held() -> None:
    story = CacheStory()
    story.tell(*serving("n0", (1, 1, 2)))
    story.stores("n0/1/0", "a b c")
    story.stores("n0/1/0", "x", below="a")
    story.stores("n0/1/1", "a b d")
    story.stores("n0/1/2", "p q")
    switched(story, "n0", (1, 1, 2), (2, 2))
    assert [usable(story, names, "n0/2/0") for names in ("a b c", "a x", "a b d", "p")] == [3, 2, 3, 0]
    assert usable(story, "p q", "n0/2/2") == 2, "its ranks stayed together"


def test_a_split_keeps_nothing_that_is_not_certain() -> None:
    story = CacheStory()
    story.tell(*serving("n0", (2, 2)))
    story.stores("n0/1/0", "a b")
    story.stores("n0/1/2", "p q")
    switched(story, "n0", (2, 2), (1, 1, 2))
    assert [usable(story, "a b", worker) for worker in ("n0/2/0", "n0/2/1")] == [0, 0]
    assert usable(story, "p q", "n0/2/2") == 2


def test_replicated_layouts_keep_all_in_a_split_and_the_common_in_a_merge() -> None:
    def replicated(composition: Composition) -> CacheStory:
        story = CacheStory()
        facts = serving("n0", composition)
        story.tell(facts[0].model_copy(update={"kv_layout": "replicated"}), *facts[1:])
        return story

    story = replicated((2,))
    story.stores("n0/1/0", "a b")
    switched(story, "n0", (2,), (1, 1))
    assert [usable(story, "a b", worker) for worker in ("n0/2/0", "n0/2/1")] == [2, 2]
    story = replicated((1, 1))
    story.stores("n0/1/0", "a b")
    story.stores("n0/1/1", "a c")
    switched(story, "n0", (1, 1), (2,))
    assert [usable(story, names, "n0/2/0") for names in ("a b", "a c")] == [1, 1]


def test_what_nobody_believes_is_not_kept() -> None:
    story = CacheStory()
    story.tell(*serving("n0", (1, 1)))
    unregistered = BlockRun(block_ids=b"".join(chain("a b")))
    story.tell(
        BlocksStored(worker=WorkerId("n0/1/0"), incarnation=2, number=1, cause="fetch", blocks=2, runs=(unregistered,))
    )
    story.stores("n0/1/1", "p q")
    switched(story, "n0", (1, 1), (2,))
    assert (usable(story, "a b", "n0/2/0"), usable(story, "p q", "n0/2/0")) == (0, 2)


def test_an_aborted_plan_is_forgotten() -> None:
    story = CacheStory()
    story.tell(*serving("n0", (2, 2)), planned("n0", (2, 2), (4,)))
    story.tell(EpochAborted(node=NodeId("n0"), epoch=2, step="draining", reason="x"), *adopted("n0", 2, ranks=4))
    assert reconcile_placements(story.state) == []


def test_metadata_beyond_one_event_is_left_out(monkeypatch) -> None:
    from services.cachemgr import reconciliation

    monkeypatch.setattr(reconciliation, "METADATA_BYTES_MAX", 2 * (90 + 22))
    story = CacheStory()
    story.tell(*serving("n0", (1, 1)))
    for name in "abcd":
        story.stores("n0/1/0", name)
    story.tell(planned("n0", (1, 1), (2,)), *adopted("n0", 2, ranks=2))
    [fact] = reconcile_placements(story.state)
    assert len(fact.workers[0].retained) == 2


def test_runs_end_where_the_tree_branches() -> None:
    a, b, c, d = chain("a b c d")
    runs = list(runs_of({a: None, b: a, c: b, d: b}))
    assert runs == [
        BlockRun(parent=None, block_ids=a + b),
        BlockRun(parent=b, block_ids=c),
        BlockRun(parent=b, block_ids=d),
    ]
