"""A story that a controller folds."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from services.controller.decider import evolve, initial, take_leadership
from services.controller.windows import close
from shared.contracts.envelope import Stored
from shared.contracts.events import WindowClosed
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


def rederive_windows(log: Iterable[Stored]) -> Iterator[tuple[WindowClosed, WindowClosed]]:
    """(recorded, derived again) for every window that the log closes. `log` is read once and reaches back to the first
    leader; with an older beginning cut off, the first windows may differ."""
    state, events = initial(), list(log)
    recorded = deque(each.data for each in events if isinstance(each.data, WindowClosed))
    for stored in events:
        while recorded and stored.stream_seq > recorded[0].to_seq:
            window = recorded.popleft()
            derived = close(state.windows, state.pool, state.parameters, window.to_seq, window.length_us)
            yield window, derived
        evolve(state, stored)
