"""Which workers exist, and which may be given work."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.envelope import EventData
from shared.contracts.events import (
    Cordoned,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    NodeDeclaredLost,
    NodeLost,
    RankAdoptedEpoch,
    Uncordoned,
)
from shared.contracts.ids import NodeId, WorkerId
from shared.model.lattice import Group
from shared.model.pool import Pool, evolve
from tests.support.story import Story, adopted, committed, registered, serving

N0 = NodeId("n0")


class PoolStory(Story):
    """`pool` has folded everything told."""

    def __init__(self, *facts: EventData) -> None:
        self.pool = Pool()
        super().__init__(partial(evolve, self.pool))
        self.tell(*facts)

    @property
    def schedulable(self) -> list[str]:
        return sorted(worker.id for worker in self.pool.workers.values() if self.pool.schedulable(worker))


def drain(*workers: str) -> DrainStarted:
    return DrainStarted(node=N0, epoch=2, workers=tuple(map(WorkerId, workers)), deadline_us=1)


def aborted(epoch: int = 2) -> EpochAborted:
    return EpochAborted(node=N0, epoch=epoch, step="draining", reason="test")


def test_workers_exist_from_their_commit() -> None:
    story = PoolStory(registered(), *adopted())
    assert story.pool.workers == {}
    story.tell(committed(composition=(1, 1, 2, 4), capacity_us=9))
    assert story.schedulable == ["n0/1/0", "n0/1/1", "n0/1/2", "n0/1/4"]
    worker = story.pool.workers[WorkerId("n0/1/4")]
    assert (worker.node, worker.group, worker.degree, worker.capacity_us) == (N0, Group(4, 4), 4, 9)
    assert story.pool.nodes[N0].composition == (1, 1, 2, 4)


def test_a_worker_waits_for_every_rank_of_its_group() -> None:
    story = PoolStory(registered(), committed(composition=(4, 4)), *adopted(ranks=7))
    assert story.schedulable == ["n0/1/0"]
    story.tell(RankAdoptedEpoch(node=N0, incarnation=1, rank=7, epoch=1, switch_us=1))
    assert story.schedulable == ["n0/1/0", "n0/1/4"]


def test_a_commit_replaces_the_workers_of_its_node_alone() -> None:
    story = PoolStory(*serving("n0"), *serving("n1"))
    story.tell(*adopted("n0", epoch=2), committed("n0", 2, (8,)))
    assert story.schedulable == ["n0/2/0", "n1/1/0", "n1/1/4"]


def test_ranks_that_have_moved_on_end_the_old_workers_before_the_commit() -> None:
    story = PoolStory(*serving())
    story.tell(RankAdoptedEpoch(node=N0, incarnation=1, rank=0, epoch=2, switch_us=1))
    assert story.schedulable == ["n0/1/4"]


def test_draining_workers_get_nothing_until_the_abort_or_commit() -> None:
    story = PoolStory(*serving())
    story.tell(drain("n0/1/0"))
    assert story.schedulable == ["n0/1/4"]
    story.tell(aborted())
    assert story.schedulable == ["n0/1/0", "n0/1/4"]
    story.tell(drain("n0/1/0", "n0/1/4"), *adopted(epoch=2), committed(epoch=2, composition=(8,)))
    assert story.schedulable == ["n0/2/0"]


def test_a_lost_incarnation_takes_its_node_and_a_late_word_of_it_does_not_take_the_next_one() -> None:
    story = PoolStory(*serving())
    lost = NodeLost(node=N0, incarnation=1, reason="test")
    story.tell(lost)
    assert story.schedulable == []
    story.tell(registered(incarnation=2, epoch=1, composition=(4, 4)))
    assert story.schedulable == ["n0/1/0", "n0/1/4"], "it has booted its last committed composition"
    story.tell(NodeDeclaredLost(node=N0, incarnation=1, silent_us=1), lost)
    assert story.schedulable == ["n0/1/0", "n0/1/4"]
    story.tell(NodeDeclaredLost(node=N0, incarnation=2, silent_us=1))
    assert story.schedulable == []


def test_a_node_that_comes_back_without_its_epoch_waits_for_it() -> None:
    story = PoolStory(*serving(), registered(incarnation=2))
    assert story.schedulable == []
    story.tell(*adopted(incarnation=1))
    assert story.schedulable == [], "the old incarnation's ranks"
    story.tell(*adopted(incarnation=2))
    assert story.schedulable == ["n0/1/0", "n0/1/4"]


def test_an_older_registration_changes_nothing() -> None:
    story = PoolStory(registered(incarnation=2, epoch=1), committed(), registered(incarnation=1))
    assert story.pool.nodes[N0].incarnation == 2
    assert story.schedulable == ["n0/1/0", "n0/1/4"]
    story.tell(NodeLost(node=N0, incarnation=2, reason="test"), registered(incarnation=2, epoch=1))
    assert story.schedulable == [], "the same incarnation does not come back"


def test_a_cordon_keeps_the_workers_and_gives_them_nothing() -> None:
    story = PoolStory(*serving(), Cordoned(node=N0, asked_by="ops"))
    assert (story.schedulable, len(story.pool.workers)) == ([], 2)
    story.tell(Uncordoned(node=N0, asked_by="ops"))
    assert len(story.schedulable) == 2


def test_decode_ranks_are_those_of_living_nodes() -> None:
    story = PoolStory(*serving("n1"), *serving("n0"))
    assert [len(story.pool.decode_ranks(NodeId(node))) for node in ("n0", "n1", "n2")] == [1, 1, 0]
    story.tell(NodeLost(node=N0, incarnation=1, reason="test"))
    assert [len(story.pool.decode_ranks(NodeId(node))) for node in ("n0", "n1")] == [0, 1]


INCARNATIONS, EPOCHS = st.integers(1, 3), st.integers(1, 3)
COMPOSITIONS = st.sampled_from([(8,), (4, 4), (1, 1, 2, 4)])
FACTS = st.one_of(
    st.builds(registered, incarnation=INCARNATIONS, epoch=EPOCHS),
    st.builds(lambda **of: adopted(**of)[of["incarnation"]], epoch=EPOCHS, incarnation=INCARNATIONS),
    st.builds(committed, epoch=EPOCHS, composition=COMPOSITIONS),
    st.builds(lambda rank: drain(f"n0/1/{rank}"), st.sampled_from([0, 4])),
    st.builds(aborted, EPOCHS),
    st.builds(NodeLost, node=st.just(N0), incarnation=INCARNATIONS, reason=st.just("r")),
    st.builds(Cordoned, node=st.just(N0), asked_by=st.just("ops")),
    st.builds(Uncordoned, node=st.just(N0), asked_by=st.just("ops")),
)


@given(st.lists(FACTS, max_size=40))
def test_any_order_of_events_leaves_a_pool_that_agrees_with_itself(facts: list[EventData]) -> None:
    story = PoolStory(*facts)
    for node in story.pool.nodes.values():
        mine = {worker.id: worker for worker in story.pool.workers.values() if worker.node == node.id}
        assert mine == {worker.id: worker for worker in node.workers}
        assert tuple(worker.degree for worker in node.workers) == node.composition
    commits = [fact for fact in facts if isinstance(fact, EpochCommitted)]
    assert set(story.pool.workers) == ({each.worker for each in commits[-1].workers} if commits else set())
