"""A story that a controller folds."""

from functools import partial

from services.controller.decider import evolve, initial, take_leadership
from tests.support.story import Story

SECOND_US = 1_000_000


class ControllerStory(Story):
    """`state` has folded everything told. Nobody leads yet."""

    def __init__(self) -> None:
        self.state = initial()
        super().__init__(partial(evolve, self.state))


def led() -> ControllerStory:
    """The same, from the first leader on."""
    story = ControllerStory()
    story.tell(take_leadership(story.state, "c1", 1))
    return story
