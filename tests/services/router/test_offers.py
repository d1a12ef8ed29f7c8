"""What a pool says it serves."""

from router_world import Log, pool_of, registered

from services.router.offers import Offer, mispriced_nodes, offered, schedulable_workers
from shared.contracts.events import NodeLost
from shared.contracts.ids import NodeId


def lost(node: str) -> NodeLost:
    return NodeLost(node=NodeId(node), incarnation=1, reason="test")


def test_the_longest_prompt_is_that_of_any_node_which_serves_the_model() -> None:
    log = Log()
    assert offered(log.state) is None
    log.fold(*pool_of(1, prompt_tokens_max=500), *pool_of(1, node="n1", prompt_tokens_max=900))
    log.fold(*pool_of(1, node="n2", prompt_tokens_max=5_000, model="other"))
    offer = offered(log.state)
    assert offer == Offer("toy", 100, 900, frozenset({"modelled"}))
    assert offer.context_tokens == 901


def test_a_pool_whose_nodes_have_died_still_says_what_it_served() -> None:
    log = Log()
    log.fold(*pool_of(1), *pool_of(1, node="n1", model="other"))
    log.fold(lost("n0"))
    assert (offered(log.state).model, schedulable_workers(log.state)) == ("other", 1)  # type: ignore[union-attr]
    log.fold(lost("n1"))
    assert (offered(log.state).model, schedulable_workers(log.state)) == ("toy", 0)  # type: ignore[union-attr]


def test_living_nodes_with_other_coefficients_are_counted() -> None:
    log = Log()
    other = registered("n1").model_copy(update={"coefficients_version": "other"})
    log.fold(registered("n0"), other, other.model_copy(update={"node": "n2"}))
    assert mispriced_nodes(log.state) == 2
    log.fold(lost("n2"))
    assert mispriced_nodes(log.state) == 1
