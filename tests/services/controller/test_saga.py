"""Every transition of one reconfiguration."""

import pytest
from controller_world import SECOND_US, ControllerStory, led
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller.capacity import Capacity
from services.controller.saga import RESUMED_MAX, Move, advance, obstacle, orders, plan
from shared.contracts.commands import Adopt, Drain
from shared.contracts.events import (
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    Frozen,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    PlacementReconciled,
    ReconfigurationPlanned,
)
from shared.contracts.ids import NodeId, WorkerId
from shared.model.lattice import Composition
from tests.support.story import adopted, registered, serving

N0 = NodeId("n0")
SPLIT = Move(N0, (1, 1, 2, 2, 2), "paper", "demand")
RETIRING = (WorkerId("n0/1/4"),)


def serving_story() -> ControllerStory:
    story = led()
    story.tell(*serving("n0", (1, 1, 2, 4)))
    return story


def planned(story: ControllerStory, move: Move = SPLIT) -> list:
    return plan(story.state.sagas, story.state.pool, story.state.parameters, move)


def next_step(story: ControllerStory) -> list:
    saga = story.state.sagas.open.get(N0)
    return advance(saga, story.state.parameters, lambda degree: Capacity(degree * 100), story.now_ns) if saga else []


def order(story: ControllerStory) -> Drain | Adopt | None:
    return orders(story.state.sagas.open[N0], story.state.parameters, 7)


def drained(workers=RETIRING) -> DrainCompleted:
    return DrainCompleted(node=N0, node_epoch=1, workers=workers, returned_requests=2, drain_us=1_500_000)


RECONCILED = PlacementReconciled(node=N0, epoch=2, workers=())


def at(step: str) -> ControllerStory:
    """A story whose saga stands at `step`."""
    story = serving_story()
    story.tell(*planned(story))
    if step == "planned":
        return story
    story.tell(*next_step(story))
    if step == "draining":
        return story
    story.tell(drained())
    if step == "switching":
        return story
    story.tell(*adopted("n0", 2))
    return story


def test_a_split_from_plan_to_commit() -> None:
    story = serving_story()
    [plan_event] = planned(story)
    assert plan_event == ReconfigurationPlanned(
        node=N0,
        epoch=2,
        policy="paper",
        reason="demand",
        old_composition=(1, 1, 2, 4),
        new_composition=(1, 1, 2, 2, 2),
        retiring=RETIRING,
        coming=(WorkerId("n0/2/4"), WorkerId("n0/2/6")),
    )
    story.tell(plan_event)
    assert order(story) is None

    [drain] = next_step(story)
    assert drain == DrainStarted(node=N0, epoch=2, workers=RETIRING, deadline_us=15 * SECOND_US)
    story.tell(drain)
    assert next_step(story) == []
    assert order(story) == Drain(term=7, epoch=2, workers=RETIRING, deadline_us=15 * SECOND_US)
    assert not story.state.pool.schedulable(story.state.pool.workers[RETIRING[0]])

    story.tell(drained())
    assert next_step(story) == []
    assert order(story) == Adopt(term=7, node=N0, incarnation=1, epoch=2, composition=(1, 1, 2, 2, 2))

    story.tell(adopted("n0", 2, switch_us=90)[7])
    story.tell(*adopted("n0", 2, ranks=6))
    assert story.state.sagas.open[N0].step == "switching"
    story.tell(adopted("n0", 2)[6])
    assert story.state.sagas.open[N0].step == "reconciling"
    assert (next_step(story), order(story)) == ([], None)

    story.tell(RECONCILED)
    [commit] = next_step(story)
    assert isinstance(commit, EpochCommitted)
    assert (commit.epoch, commit.drain_us, commit.switch_us) == (2, 1_500_000, 90)
    assert [(w.worker, w.degree, w.capacity_us) for w in commit.workers][-2:] == [
        ("n0/2/4", 2, 200),
        ("n0/2/6", 2, 200),
    ]
    story.tell(commit)
    assert not story.state.sagas.open
    assert all(story.state.pool.schedulable(worker) for worker in story.state.pool.nodes[N0].workers)


def test_a_merge_retires_both_siblings() -> None:
    story = serving_story()
    [plan_event] = planned(story, Move(N0, (2, 2, 4), "paper", "long"))
    assert (plan_event.retiring, plan_event.coming) == (("n0/1/0", "n0/1/1"), ("n0/2/0",))


LIMITS = {"planned": 1.0, "draining": 15.0, "switching": 2.0, "reconciling": 2.0}


@pytest.mark.parametrize("step", LIMITS)
def test_every_step_has_a_limit(step: str) -> None:
    story = at(step)
    story.wait(LIMITS[step])
    assert not any(isinstance(each, EpochAborted) for each in next_step(story))
    story.wait(0.001)
    [abort] = next_step(story)
    assert abort == EpochAborted(node=N0, epoch=2, step=step, reason=f"took longer than {LIMITS[step]:g} s")
    story.tell(abort)
    assert not story.state.sagas.open
    assert story.state.pool.nodes[N0].draining == frozenset()


def ends(story: ControllerStory) -> bool:
    return any(isinstance(each, EpochAborted) for each in next_step(story))


@pytest.mark.parametrize("step", LIMITS)
def test_a_step_has_its_limit_anew_under_another_leader_but_a_drain_goes_on_without_one(step: str) -> None:
    story = at(step)
    story.wait(LIMITS[step] + 1)
    assert ends(story)
    story.tell(LeadershipTaken(leader="c2", term=2, resumes=True))
    assert ends(story) is (step == "draining")
    story.wait(LIMITS[step] + 0.001)
    assert ends(story), "and no longer than that"


def test_leaders_that_come_and_go_do_not_keep_drained_workers_idle_for_good() -> None:
    story = at("switching")
    for term in range(2, 2 + RESUMED_MAX):
        story.wait(3)
        story.tell(LeadershipTaken(leader="c2", term=term, resumes=True))
        assert not ends(story)
    story.wait(3)
    story.tell(LeadershipTaken(leader="c3", term=9, resumes=True))
    assert ends(story)


def test_in_an_old_record_another_leader_finds_the_limit_passed() -> None:
    story = at("switching")
    story.wait(3)
    story.tell(LeadershipTaken(leader="c2", term=2))
    assert ends(story)


@pytest.mark.parametrize("step", LIMITS)
@pytest.mark.parametrize(
    "loss",
    [
        NodeLost(node=N0, incarnation=1, reason="a rank died"),
        NodeDeclaredLost(node=N0, incarnation=1, silent_us=3 * SECOND_US),
        registered("n0", incarnation=2, epoch=1, composition=(1, 1, 2, 4)),
    ],
    ids=lambda loss: loss.TYPE,
)
def test_a_lost_node_aborts_at_any_step(step: str, loss) -> None:
    story = at(step)
    story.tell(loss)
    assert next_step(story) == [EpochAborted(node=N0, epoch=2, step=step, reason="node-lost")]


@pytest.mark.parametrize(
    ("step", "ends"), [("planned", True), ("draining", True), ("switching", False), ("reconciling", False)]
)
def test_a_freeze_stops_what_has_not_switched(step: str, ends: bool) -> None:
    story = at(step)
    story.tell(Frozen(asked_by="me"))
    assert ([each.reason for each in next_step(story)] == ["frozen"]) is ends


def test_a_placement_that_is_reconciled_in_time_is_committed_however_late_the_next_leader_comes() -> None:
    story = at("reconciling")
    story.tell(RECONCILED)
    story.wait(60)
    assert [each.TYPE for each in next_step(story)] == ["epoch-committed"]


def test_another_drain_or_another_epoch_moves_nothing() -> None:
    story = at("draining")
    story.tell(drained((WorkerId("n0/1/0"),)))
    assert story.state.sagas.open[N0].step == "draining"
    story = at("switching")
    story.tell(*adopted("n0", 3), *adopted("n0", 2, incarnation=9), PlacementReconciled(node=N0, epoch=3, workers=()))
    assert story.state.sagas.open[N0].step == "switching"
    assert not story.state.sagas.open[N0].reconciled


def test_an_epoch_number_is_used_once() -> None:
    story = at("planned")
    story.wait(2)
    story.tell(*next_step(story))
    [again] = planned(story)
    assert again.epoch == 3


@pytest.mark.parametrize(
    ("composition", "why"),
    [
        ((1, 1, 2, 4), "node n0 has this composition"),
        ((4,), "composition (4,): 4 ranks, but node n0 has 8"),
        ((1, 2, 1, 4), "composition (1, 2, 1, 4): a degree-2 worker cannot start at rank 1"),
        ((3, 5), "composition (3, 5): degree 3 is not one of (1, 2, 4, 8)"),
    ],
)
def test_an_impossible_composition_is_not_planned(composition: Composition, why: str) -> None:
    story = serving_story()
    move = SPLIT._replace(composition=composition)
    assert obstacle(story.state.sagas, story.state.pool, story.state.parameters, move) == why
    assert planned(story, move) == []


def test_a_degree_that_the_engine_has_no_group_for_is_not_planned() -> None:
    story = serving_story()
    story.tell(registered(incarnation=2, epoch=1, composition=(1, 1, 2, 4)).model_copy(update={"degrees": (1, 2, 4)}))
    move = SPLIT._replace(composition=(8,))
    why = obstacle(story.state.sagas, story.state.pool, story.state.parameters, move)
    assert why == "composition (8,): degrees [8] are not among (1, 2, 4) of node n0"


def test_a_worker_that_holds_less_than_a_step_computes_is_not_planned_and_one_that_is_there_stays() -> None:
    story = serving_story()
    small = {"degree_min": 4, "blocks_per_rank": 10, "block_tokens": 64}
    story.tell(registered(incarnation=2, epoch=1, composition=(1, 1, 2, 4)).model_copy(update=small))

    def why(*composition: int) -> str | None:
        move = SPLIT._replace(composition=composition)
        return obstacle(story.state.sagas, story.state.pool, story.state.parameters, move)

    assert why(1, 1, 2, 2, 2) == (
        "composition (1, 1, 2, 2, 2): a worker of degree 2 holds 1280 tokens of KV, less than one step computes of a prompt;"
        " workers of node n0 need a degree of 4"
    )
    assert why(4, 4) is why(8) is None


def test_one_saga_per_node_and_reconfigurations_max_in_the_pool() -> None:
    story = at("planned")
    assert planned(story) == []
    for node in ("n1", "n2"):
        story.tell(*serving(node, (8,)))
    story.tell(*planned(story, Move(NodeId("n1"), (4, 4), "paper", "demand")))
    third = Move(NodeId("n2"), (4, 4), "paper", "demand")
    assert planned(story, third) == []
    why = obstacle(story.state.sagas, story.state.pool, story.state.parameters, third)
    assert why == "2 nodes are being reconfigured; reconfigurations_max is 2"


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        (Frozen(asked_by="me"), "the pool is frozen"),
        (NodeLost(node=N0, incarnation=1, reason="x"), "node n0 does not serve"),
    ],
    ids=["frozen", "lost"],
)
def test_nothing_is_planned_while_it_may_not(fact, why: str) -> None:
    story = serving_story()
    story.tell(fact)
    assert obstacle(story.state.sagas, story.state.pool, story.state.parameters, SPLIT) == why
    assert planned(story) == []


FACTS = [
    drained(),
    *adopted("n0", 2),
    RECONCILED,
    NodeLost(node=N0, incarnation=1, reason="x"),
    registered("n0", incarnation=2, epoch=1, composition=(1, 1, 2, 4)),
    Frozen(asked_by="me"),
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(FACTS), st.sampled_from(["advance", 0.5, 3.0])), max_size=40))
def test_whatever_happens_a_plan_has_one_end(acts) -> None:
    """Facts in any order and number, a leader that looks whenever it likes: one commit or one abort, at last."""
    story = serving_story()
    story.tell(*planned(story))
    for act in [*acts, 20.0, "advance", 20.0, "advance", "advance"]:
        if act == "advance":
            story.tell(*next_step(story))
        elif isinstance(act, float):
            story.wait(act)
        else:
            story.tell(act)
    ends = [each.data for each in story.events if isinstance(each.data, EpochAborted | EpochCommitted)]
    assert [each.epoch for each in ends] == [1, 2]
    if isinstance(ends[1], EpochCommitted):
        told = [each.TYPE for each in (event.data for event in story.events)]
        assert told.index("drain-started") < told.index("drain-completed", told.index("drain-started"))
        assert "placement-reconciled" in told
