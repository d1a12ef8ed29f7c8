"""Which epoch a node should serve, whatever became of the leader that asked last."""

from controller_world import ControllerStory, led

from services.controller.capacity import Capacity
from services.controller.decider import Incarnation
from services.controller.epochs import Configured, Wanted, commit, wanted
from services.controller.saga import Move, plan
from shared.contracts.events import EpochAborted, NodeLost
from shared.contracts.ids import NodeId
from tests.support.story import adopted, committed, registered, serving

N0 = NodeId("n0")
CONFIGURED = Configured((1, 1, 2, 4), {NodeId("n1"): (8,)})


def asked(story: ControllerStory, refused=None) -> list[Wanted]:
    return wanted(story.state, CONFIGURED, refused or {})


def capacity_of(degree: int) -> Capacity:
    return Capacity(100 * degree, "profiled-1" if degree == 4 else None)


def test_a_new_node_gets_epoch_1_and_a_repeated_answer_commits_once() -> None:
    story = led()
    story.tell(registered())
    [want] = asked(story)
    assert want == Wanted(N0, 1, 1, (1, 1, 2, 4))
    story.tell(*adopted())
    assert asked(story) == [want], "adopted and not committed: the leader may have died between the two"
    [fact] = commit(story.state, want, capacity_of)
    assert [w.capacity_version for w in fact.workers] == [None, None, None, "profiled-1"]
    assert [(w.worker, w.first_rank, w.degree, w.capacity_us) for w in fact.workers] == [
        ("n0/1/0", 0, 1, 100),
        ("n0/1/1", 1, 1, 100),
        ("n0/1/2", 2, 2, 200),
        ("n0/1/4", 4, 4, 400),
    ]
    story.tell(fact)
    assert commit(story.state, want, capacity_of) == []
    assert asked(story) == []
    assert all(map(story.state.pool.schedulable, story.state.pool.workers.values()))


def test_each_node_has_its_own_composition() -> None:
    story = led()
    story.tell(registered("n1"), registered("n0"))
    assert [(each.node, each.composition) for each in asked(story)] == [("n0", (1, 1, 2, 4)), ("n1", (8,))]


def test_a_composition_that_does_not_fit_says_why() -> None:
    story = led()
    story.tell(registered(ranks=4))
    [want] = asked(story)
    assert want.misfit == "composition (1, 1, 2, 4): 8 ranks, but node n0 has 4"


def test_a_node_that_booted_an_older_composition_adopts_the_committed_one_again() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)), committed("n0", 2, (8,)), *adopted("n0", 2))
    assert asked(story) == []
    story.tell(NodeLost(node=N0, incarnation=1, reason="x"))
    assert asked(story) == []
    story.tell(registered(incarnation=2, epoch=1, composition=(4, 4)))
    [want] = asked(story)
    assert want == Wanted(N0, 2, 2, (8,))
    story.tell(*adopted("n0", 2, incarnation=2))
    assert commit(story.state, want, capacity_of) == [], "it is committed"
    assert asked(story) == []


def test_a_node_that_booted_what_is_committed_is_left_alone() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)), registered(incarnation=2, epoch=1, composition=(4, 4)))
    assert asked(story) == []


def test_an_abort_after_the_switch_goes_forward_to_the_old_composition() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)))
    story.tell(*plan(story.state.sagas, story.state.pool, story.state.parameters, Move(N0, (8,), "paper", "x")))
    story.tell(*adopted("n0", 2))
    assert asked(story) == [], "the saga's business"
    story.tell(EpochAborted(node=N0, epoch=2, step="reconciling", reason="x"))
    [want] = asked(story)
    assert want == Wanted(N0, 1, 3, (4, 4))
    story.tell(*adopted("n0", 3))
    [fact] = commit(story.state, want, capacity_of)
    story.tell(fact)
    assert asked(story) == []


def test_an_abort_before_the_switch_asks_for_nothing() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)))
    story.tell(*plan(story.state.sagas, story.state.pool, story.state.parameters, Move(N0, (8,), "paper", "x")))
    story.tell(EpochAborted(node=N0, epoch=2, step="draining", reason="x"))
    assert asked(story) == []


def test_a_number_that_was_refused_as_stale_is_not_asked_for_again() -> None:
    story = led()
    story.tell(registered(), *adopted("n0", 1))  # an earlier leader was configured otherwise
    [want] = asked(story, {Incarnation(N0, 1): 1})
    assert want.epoch == 2
    [want] = asked(story, {Incarnation(N0, 7): 5})
    assert want.epoch == 1, "another incarnation refused that"


def test_new_hardware_gets_the_configured_composition() -> None:
    story = led()
    story.tell(*serving("n1", (4,)), registered("n1", incarnation=2, ranks=8, epoch=0))
    [want] = asked(story)
    assert want == Wanted(NodeId("n1"), 2, 2, (8,))
    story.tell(*adopted("n1", 2, incarnation=2))  # and the leader died before its commit
    assert asked(story) == [want._replace(epoch=3)], "2 may have been another composition"


def test_a_number_of_an_aborted_saga_does_not_keep_a_new_life_from_the_committed_epoch() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)))
    story.tell(*plan(story.state.sagas, story.state.pool, story.state.parameters, Move(N0, (8,), "paper", "x")))
    story.tell(EpochAborted(node=N0, epoch=2, step="draining", reason="node-lost"), registered(incarnation=2))
    assert asked(story) == [Wanted(N0, 2, 1, (4, 4))]


def test_an_answer_of_a_node_that_has_moved_on_commits_nothing() -> None:
    story = led()
    story.tell(registered())
    [want] = asked(story)
    story.tell(NodeLost(node=N0, incarnation=1, reason="x"))
    assert commit(story.state, want, capacity_of) == []
    story.tell(registered(incarnation=2))
    assert commit(story.state, want, capacity_of) == []
