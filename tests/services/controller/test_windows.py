"""Windows by hand, and every recorded window derived again from the log alone."""

from controller_world import SECOND_US, ControllerStory, led, rederive_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller import windows as windows_model
from services.controller.decider import close_window, take_leadership
from shared.contracts.events import (
    ParametersChanged,
    RequestCancelled,
    RouterLost,
    RouterRegistered,
    WindowClosed,
)
from shared.contracts.ids import RequestId, RouterId
from tests.support.story import assigned, committed, completed, prefilled, received, registered, serving

W = "n0/1/0"


def window_of(story: ControllerStory) -> WindowClosed:
    [window] = close_window(story.state, story.now_ns)
    return window


def test_a_window_by_hand() -> None:
    story = led()
    story.tell(*serving(composition=(4, 4), capacity_us=14 * SECOND_US))
    # a: 10,000 tokens, 2 s predicted, just in time. b: 40,000 tokens (long), 5 s, too late. c: no SLO, and placed again.
    story.tell(received("a", 10_000, slo_us=2 * SECOND_US), assigned("a", W, 6_000, 4_000, 2 * SECOND_US))
    story.tell(received("b", 40_000, slo_us=4 * SECOND_US), assigned("b", W, 40_000, 0, 5 * SECOND_US))
    # c's length is the limit itself, which is not long yet.
    story.tell(received("c", 32_768), assigned("c", W, 32_768, 0, SECOND_US))
    story.tell(assigned("c", W, 32_768, 0, SECOND_US, attempt=2))
    story.tell(
        prefilled("a", W, 7_000, cached_own_tokens=2_000, cached_fetched_tokens=1_000), prefilled("b", W, 40_000)
    )
    story.tell(completed("a", W, 2 * SECOND_US), completed("b", W, 5 * SECOND_US))
    end = story.tell(completed("c", W, 9 * SECOND_US))
    story.wait(20)

    window = window_of(story)

    assert window == WindowClosed(
        k=1,
        from_seq=1,
        to_seq=end,
        length_us=20 * SECOND_US,
        requests=3,
        completed=3,
        prompt_tokens=82_768,
        demand_us=8 * SECOND_US,
        long_tokens=32_768,
        long_request_share=1 / 3,
        long_token_share=40_000 / 82_768,
        capacity_us=2 * 14 * SECOND_US,
        attainment=10_000 / 50_000,
        hit_rate=3_000 / 50_000,
        signals=("underload",),
        persistence={"underload": 1},
        recent_demand=(400_000,),
        long_reference=(1 / 3, 40_000 / 82_768),
        mean_ttft_us=16 * SECOND_US // 3,
    )


def test_nothing_closes_before_its_time_or_without_a_leader() -> None:
    story = ControllerStory()
    story.wait(100)
    assert close_window(story.state, story.now_ns) == []
    story.tell(take_leadership(story.state, "c1", 1))
    story.wait(19.9)
    assert close_window(story.state, story.now_ns) == []
    story.wait(0.1)
    assert len(close_window(story.state, story.now_ns)) == 1


def test_what_came_before_the_first_leader_is_in_no_window() -> None:
    story = ControllerStory()
    story.tell(received("a", 10), assigned("a", W, 10, 0, 5))
    story.tell(take_leadership(story.state, "c1", 1))
    story.wait(20)
    assert window_of(story).requests == 0


def test_an_empty_window_has_no_shares() -> None:
    story = led()
    story.wait(20)
    window = window_of(story)
    assert (window.attainment, window.hit_rate, window.long_request_share, window.capacity_us) == (None, None, 0.0, 0)


def test_what_is_stored_between_the_close_and_its_record_belongs_to_the_next_window() -> None:
    story = led()
    story.tell(received("a", 10), assigned("a", W, 10, 0, 5))
    story.wait(20)
    first = window_of(story)
    story.tell(received("b", 20), assigned("b", W, 20, 0, 7))
    story.tell(first)
    story.wait(20)
    second = window_of(story)
    assert (first.requests, first.demand_us) == (1, 5)
    assert (second.k, second.from_seq, second.requests, second.demand_us) == (2, first.to_seq, 1, 7)


def test_a_longer_window_has_more_capacity() -> None:
    story = led()
    story.tell(*serving(composition=(4, 4), capacity_us=10 * SECOND_US))
    story.wait(30)  # a new leader came 10 s late
    assert window_of(story).capacity_us == 30 * SECOND_US


def test_capacity_counts_workers_that_may_be_given_work() -> None:
    story = led()
    story.tell(
        *serving("n0", (4, 4), 10), registered("n1"), committed("n1", 1, (8,), 10)
    )  # n1's ranks have not adopted
    story.wait(20)
    assert window_of(story).capacity_us == 20


def test_requests_that_end_otherwise_leave_nothing_behind() -> None:
    story = led()
    story.tell(received("other", 10, 5), source="r-2-bb")
    story.tell(RouterRegistered(router=RouterId("r")), received("a", 10, 5), received("b", 10, 5), source="r-1-aa")
    story.tell(RequestCancelled(request=RequestId("a")), source="r-1-aa")
    story.tell(RouterLost(router=RouterId("r"), source="r-1-aa"))
    story.tell(received("late", 10, 5), source="r-1-aa")
    assert set(story.state.windows.open) == {"other"}, "another router's goes on"


def test_a_change_of_the_threshold_holds_from_its_event_on() -> None:
    story = led()
    story.tell(assigned("a", W, 500))
    story.tell(ParametersChanged(parameters_version=1, changes={"long_tokens": 400}, asked_by="me"))
    story.tell(assigned("b", W, 500))
    story.wait(20)
    assert window_of(story).long_request_share == 0.5


def test_counts_beyond_the_bound_are_added_up(monkeypatch) -> None:
    monkeypatch.setattr(windows_model, "UNCLOSED_MAX", 3)
    story = led()
    for i in range(10):
        story.tell(assigned(f"r{i}", W, 10, 0, 1))
    story.wait(20)
    assert len(story.state.windows.counted) == 3
    assert window_of(story).requests == 10


ACTS = st.lists(
    st.sampled_from(["ask", "finish", "prefill", "wait", "close", "late-close", "restart", "lead", "shorter"]),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ACTS, st.randoms(use_true_random=False))
def test_every_recorded_window_can_be_derived_again(acts, chance) -> None:
    story = led()
    story.tell(*serving(composition=(1, 1, 2, 4), capacity_us=1_000))
    open_requests, asked, version, incarnation = [], 0, 0, 1
    for act in [*acts, "wait", "close"]:
        if act == "ask":
            asked += 1
            tokens = chance.randrange(1, 60_000)
            story.tell(received(f"r{asked}", tokens, slo_us=chance.choice([0, 1_000])))
            story.tell(assigned(f"r{asked}", W, tokens, 0, chance.randrange(5_000)))
            open_requests.append((f"r{asked}", tokens))
        elif act == "finish" and open_requests:
            request, _ = open_requests.pop(chance.randrange(len(open_requests)))
            story.tell(completed(request, W, chance.randrange(2_000)))
        elif act == "prefill" and open_requests:
            request, tokens = chance.choice(open_requests)
            story.tell(prefilled(request, W, tokens, cached_own_tokens=chance.randrange(100)))
        elif act == "wait":
            story.wait(chance.choice([1, 21]))
        elif act == "close":
            story.tell(*close_window(story.state, story.now_ns))
        elif act == "late-close":
            decided = close_window(story.state, story.now_ns)
            story.tell(assigned(f"x{len(story.events)}", W, 7, 0, 3), *decided)
        elif act == "restart":
            incarnation += 1
            story.tell(registered("n0", incarnation=incarnation))
        elif act == "lead":
            story.tell(take_leadership(story.state, "c2", 1))
        elif act == "shorter":
            version += 1
            changes = {"window_s": chance.choice([1, 10, 20])}
            story.tell(ParametersChanged(parameters_version=version, changes=changes, asked_by="me"))
    recorded = [each.data for each in story.events if isinstance(each.data, WindowClosed)]
    pairs = list(rederive_windows(story.events))
    assert [each for each, _ in pairs] == recorded
    assert all(derived == each for each, derived in pairs)


def test_a_falsified_window_is_found() -> None:
    story = led()
    story.tell(assigned("a", W, 10, 0, 5))
    story.wait(20)
    story.tell(window_of(story).model_copy(update={"demand_us": 6}))
    story.tell(assigned("b", W, 10, 0, 5))
    [(recorded, derived)] = rederive_windows(story.events)
    assert (recorded.demand_us, derived.demand_us) == (6, 5)
