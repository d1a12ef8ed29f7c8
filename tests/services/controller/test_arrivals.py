"""What a forecast may look back at, as it is folded."""

from services.controller.arrivals import Arrivals, Change, evolve
from shared.contracts.events import PricedCandidate
from shared.contracts.ids import WorkerId
from tests.support.story import START_NS, Story, assigned, committed

W = WorkerId("n0/1/0")


def candidate(cached_tokens: int) -> PricedCandidate:
    return PricedCandidate(
        worker=W,
        degree=1,
        cached_tokens=cached_tokens,
        queue_us=0,
        service_us=1,
        occupancy_us=0,
        price_us=1,
        trust="exact",
    )


def test_an_arrival_knows_what_the_best_and_the_least_of_the_named_workers_held() -> None:
    arrivals = Arrivals()
    story = Story(lambda stored: evolve(arrivals, stored))
    placed = assigned("r1", W, 400, 600)
    story.tell(placed.model_copy(update={"candidates": tuple(map(candidate, (600, 900, 100)))}))
    story.wait(1)
    story.tell(assigned("r2", W, 400, 600), assigned("r1", W, 400, 600, attempt=2))
    first, second = arrivals.recent
    assert (first.prompt_tokens, first.cached_tokens, first.best_tokens, first.least_tokens) == (1_000, 600, 900, 100)
    assert (second.best_tokens, second.least_tokens) == (600, 600), "of one that names nobody"
    assert arrivals.first_ns == START_NS


def test_a_change_is_one_of_the_pool_and_of_shapes() -> None:
    arrivals = Arrivals()
    story = Story(lambda stored: evolve(arrivals, stored))
    story.tell(committed("n0", 1, (4, 4)), committed("n1", 1, (4, 2, 2)))
    assert arrivals.changes == {}, "a first composition is no change"
    story.wait(5)
    story.tell(committed("n0", 2, (8,)), committed("n1", 2, (2, 2, 4)))
    assert arrivals.changes == {Change((4, 4), (8,)): START_NS + 5 * 10**9}, (
        "the same workers in another order are none"
    )
