"""What a forecast may look back at, as it is folded."""

from services.controller.arrivals import Arrivals, Change, evolve
from shared.contracts.ids import WorkerId
from tests.support.story import START_NS, Story, assigned, committed

W = WorkerId("n0/1/0")


def test_first_attempts_count_and_the_first_of_all_is_known() -> None:
    arrivals = Arrivals()
    story = Story(lambda stored: evolve(arrivals, stored))
    story.tell(assigned("r1", W, 400, 600))
    story.wait(1)
    story.tell(assigned("r2", W, 300), assigned("r1", W, 400, 600, attempt=2))
    assert [each.prompt_tokens for each in arrivals.recent] == [1_000, 300]
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
