"""Terms, losses and operators, purely."""

import pytest
from controller_world import ControllerStory, led
from pydantic import ValidationError

from services.controller import decider
from services.controller.decider import Asker, Incarnation, NotNow, UnknownNode
from services.controller.liveness import Liveness
from shared.contracts.events import NodeDeclaredLost, RouterLost, RouterRegistered
from shared.contracts.ids import NodeId, RouterId, Source
from tests.support.story import registered, serving

N0 = NodeId("n0")
ME = Asker("me", "because")
S = 10**9


def test_a_term_is_above_every_term_of_the_log() -> None:
    story = ControllerStory()
    assert decider.take_leadership(story.state, "c1", 5).term == 5
    story.tell(decider.take_leadership(story.state, "c1", 5))
    assert decider.take_leadership(story.state, "c2", 6).term == 6
    assert decider.take_leadership(story.state, "c2", 1).term == 6, "the lease began to count anew"
    assert story.state.leader == "c1"


def test_only_the_living_are_lost_and_once() -> None:
    story = led()
    story.tell(registered("n0"), registered("n1", incarnation=3))
    silent = {Incarnation(NodeId("n1"), 3): 4_000_000, Incarnation(NodeId("n1"), 2): 9_000_000}
    lost = decider.lose_nodes(story.state, silent)
    assert lost == [NodeDeclaredLost(node=NodeId("n1"), incarnation=3, silent_us=4_000_000)]
    story.tell(*lost)
    assert decider.lose_nodes(story.state, silent) == []
    assert decider.living_nodes(story.state) == {Incarnation(N0, 1)}


def test_each_process_of_a_router_is_lost_for_itself() -> None:
    story = led()
    story.tell(RouterRegistered(router=RouterId("r")), source="router-1-aaaa")
    story.tell(RouterRegistered(router=RouterId("r")), source="router-1-bbbb")
    silent = [Source("router-1-aaaa"), Source("router-9-zzzz")]
    lost = decider.lose_routers(story.state, silent)
    assert lost == [RouterLost(router=RouterId("r"), source="router-1-aaaa")]
    story.tell(*lost)
    assert decider.lose_routers(story.state, silent) == []
    assert list(story.state.routers) == ["router-1-bbbb"]


def test_a_freeze_and_its_repetition() -> None:
    story = led()
    assert decider.thaw(story.state, ME) == []
    story.tell(*decider.freeze(story.state, ME))
    assert story.state.parameters.frozen
    assert decider.freeze(story.state, ME) == []
    story.tell(*decider.thaw(story.state, ME))
    assert not story.state.parameters.frozen


def test_a_cordon_and_its_repetition() -> None:
    story = led()
    story.tell(registered())
    assert decider.uncordon(story.state, N0, ME) == []
    [fact] = decider.cordon(story.state, N0, ME)
    assert (fact.asked_by, fact.reason) == ("me", "because")
    story.tell(fact)
    assert decider.cordon(story.state, N0, ME) == []
    story.tell(*decider.uncordon(story.state, N0, ME))
    assert not story.state.pool.nodes[N0].cordoned


def test_an_unknown_node_names_the_known_ones() -> None:
    story = led()
    story.tell(registered())
    with pytest.raises(UnknownNode, match=r"node: 'nx' is not one of \['n0'\]"):
        decider.cordon(story.state, NodeId("nx"), ME)


def test_parameters_change_by_what_differs() -> None:
    story = led()
    [fact] = decider.change_parameters(story.state, {"beta": 5.0, "lam": 0.1}, ME)
    assert (fact.changes, fact.parameters_version) == ({"beta": 5.0}, 1)
    story.tell(fact)
    assert (story.state.parameters.beta, story.state.parameters.version) == (5.0, 1)
    assert decider.change_parameters(story.state, {"beta": 5}, ME) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beta": 1_000}, "less than or equal to 100"),
        ({"betta": 3}, "betta"),
        ({"frozen": True}, "frozen cannot be set: `vertumnus freeze`"),
        ({"theta_reclaim": 3.0}, r"theta_reclaim: 3.0 must be below theta_intra \(2.0\)"),
    ],
)
def test_bad_parameters_name_the_field_and_the_limit(changes, says: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=says):
        decider.change_parameters(led().state, changes, ME)


# --- heartbeats


def test_silence_counts_from_the_last_heartbeat() -> None:
    alive: Liveness[str] = Liveness(0)
    assert alive.silent({"a"}, 0) == {}
    for second in range(1, 11):
        alive.heard("a", second * S)
    assert alive.silent({"a"}, 12 * S) == {}
    assert alive.silent({"a"}, 13 * S) == {"a": 3 * S}


def test_a_newcomer_has_five_seconds() -> None:
    alive: Liveness[str] = Liveness(0)
    assert alive.silent({"a"}, 100 * S) == {}
    alive.heard("a", 101 * S)
    assert alive.silent({"a"}, 104_900_000_000) == {}
    assert alive.silent({"a"}, 105 * S) == {"a": 4 * S}


def test_after_a_deafness_everybody_has_five_seconds() -> None:
    alive: Liveness[str] = Liveness(0)
    alive.silent({"a"}, 0)
    alive.heard("a", 10 * S)
    alive.was_deaf(30 * S)
    assert alive.silent({"a"}, 34 * S) == {}
    assert alive.silent({"a"}, 35 * S) == {"a": 25 * S}


def test_heartbeats_of_strangers_are_not_kept() -> None:
    alive: Liveness[str] = Liveness(0)
    alive.heard("x", 1)
    alive.silent({"a"}, 2)
    alive.silent(set(), 3)
    assert not alive._first_ns
    assert not alive._last_ns


def test_a_pin_and_its_repetition() -> None:
    story = led()
    story.tell(registered())
    assert decider.unpin(story.state, N0, ME) == []
    story.tell(*decider.pin(story.state, N0, ME))
    assert story.state.pool.nodes[N0].pinned
    assert decider.pin(story.state, N0, ME) == []
    story.tell(*decider.unpin(story.state, N0, ME))
    assert not story.state.pool.nodes[N0].pinned


def test_an_operators_reconfiguration_is_a_plan_with_a_name_to_it() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)))
    assert decider.reconfigure(story.state, N0, (4, 4), ME) == [], "it has that"
    [plan] = decider.reconfigure(story.state, N0, (8,), ME)
    assert (plan.asked_by, plan.reason, plan.policy, plan.window) == ("me", "because", "operator", None)
    story.tell(plan)
    with pytest.raises(NotNow, match="node n0 is being reconfigured"):
        decider.reconfigure(story.state, N0, (4, 4), ME)
    with pytest.raises(UnknownNode):
        decider.reconfigure(story.state, NodeId("nx"), (8,), ME)


def test_a_drain_cordons_and_retires_every_worker() -> None:
    story = led()
    story.tell(*serving("n0", (4, 4)))
    cordoned, plan = decider.drain(story.state, N0, ME)
    assert cordoned.TYPE == "cordoned"
    assert (plan.retiring, plan.coming) == (("n0/1/0", "n0/1/4"), ("n0/2/0", "n0/2/4"))
    story.tell(cordoned, plan)
    with pytest.raises(NotNow):
        decider.drain(story.state, N0, ME)
