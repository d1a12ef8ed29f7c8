"""What workers are busy with, by hand."""

import pytest
from controller_world import SECOND_US, ControllerStory

from services.controller.activity import Activity
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    NodeLost,
    PrefillAborted,
    PrefillStarted,
    RequestCancelled,
    RequestRedirected,
    RouterLost,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RequestId, RouterId, WorkerId
from tests.support.story import assigned, committed, prefilled

A, W = RequestId("a"), WorkerId("n0/1/0")
ROUTER = "router-1-aaaa"


def started(request: str = "a", attempt: int = 1) -> PrefillStarted:
    return PrefillStarted(request=RequestId(request), attempt=attempt, worker=W, queue_us=0)


def running(*requests: str) -> ControllerStory:
    """Each of `requests` has begun; each is predicted to take 4 s."""
    story = ControllerStory()
    for request in requests:
        story.tell(assigned(request, W, 1_000, service_us=4 * SECOND_US), source=ROUTER)
        story.tell(started(request))
    return story


def activity(story: ControllerStory) -> Activity:
    return story.state.activity


@pytest.mark.parametrize(("elapsed_s", "left_s"), [(0, 4), (1, 3), (3.9, 0.975), (8, 2)])
def test_what_runs_needs_the_rest_of_its_prediction_or_a_quarter_of_its_time(elapsed_s: float, left_s: float) -> None:
    story = running("a")
    story.wait(elapsed_s)
    assert activity(story).drain_us(W, story.now_ns) == round(left_s * SECOND_US)


def test_what_waits_is_given_back_and_takes_no_time() -> None:
    story = ControllerStory()
    story.tell(assigned("a", W, 1_000, service_us=4 * SECOND_US))
    assert activity(story).drain_us(W, story.now_ns) == 0


def test_requests_in_one_step_add_up() -> None:
    story = running("a", "b")
    story.wait(1)
    assert activity(story).drain_us(W, story.now_ns) == 7 * SECOND_US


@pytest.mark.parametrize(
    "end",
    [
        prefilled("a", W, 1_000),
        PrefillAborted(request=A, attempt=1, worker=W, reason="draining"),
        RequestRedirected(request=A, attempt=1, worker=W, reason="draining"),
        RequestCancelled(request=A),
        RouterLost(router=RouterId("r"), source=ROUTER),
        NodeLost(node=NodeId("n0"), incarnation=1, reason="x"),
    ],
    ids=lambda end: end.TYPE,
)
def test_every_end_frees_the_worker(end: EventData) -> None:
    story = running("a")
    story.tell(end)
    assert not activity(story).backlog.prefills


def test_an_end_of_an_earlier_attempt_frees_nothing() -> None:
    story = running("a")
    story.tell(assigned("a", W, 1_000, service_us=SECOND_US, attempt=2), started(attempt=2))
    story.tell(prefilled("a", W, 1_000), started(attempt=1))
    assert activity(story).drain_us(W, story.now_ns) == SECOND_US


def test_a_lost_router_assigns_nothing() -> None:
    story = ControllerStory()
    story.tell(RouterLost(router=RouterId("r"), source=ROUTER))
    story.tell(assigned("a", W, 1_000, service_us=SECOND_US), source=ROUTER)
    assert not activity(story).backlog.prefills


def window(k: int) -> WindowClosed:
    return WindowClosed(
        k=k, from_seq=0, to_seq=0, length_us=1, requests=0, completed=0, prompt_tokens=0, demand_us=0, long_tokens=1,
        long_request_share=0, long_token_share=0, capacity_us=0,
    )  # fmt: skip


def test_reuse_is_halved_with_each_window_and_ends_with_the_worker() -> None:
    story = ControllerStory()
    story.tell(prefilled("a", W, 100, cached_own_tokens=800), prefilled("b", W, 100, cached_own_tokens=200))
    story.tell(prefilled("c", "n1/1/0", 100, cached_own_tokens=1), prefilled("d", "n1/1/0", 100))
    story.tell(window(1))
    assert activity(story).reused_tokens == {W: 500}
    story.tell(window(2))
    story.tell(committed("n0", 2))
    assert activity(story).reused_tokens == {}
