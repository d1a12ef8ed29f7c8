from hypothesis import given
from hypothesis import strategies as st

from cli.embedded.restarts import CRASHES_MAX, DELAY_S_MAX, FIRST_DELAY_S, PROVEN_S, Restarts


def test_delays_double_up_to_their_bound_and_then_end() -> None:
    state, delays = Restarts(), []
    while True:
        state = state.after_crash(ran_s=1.0)
        if state.delay_s is None:
            break
        delays.append(state.delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_a_process_that_had_proven_itself_starts_over() -> None:
    state = Restarts(in_a_row=CRASHES_MAX - 1).after_crash(ran_s=PROVEN_S)
    assert state.delay_s == FIRST_DELAY_S


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50))
def test_every_delay_is_bounded_and_only_a_row_of_short_runs_gives_up(runs_s: list[float]) -> None:
    state = Restarts()
    for ran_s in runs_s:
        state = state.after_crash(ran_s)
    short_at_the_end = next((i for i, ran_s in enumerate(reversed(runs_s)) if ran_s >= PROVEN_S), len(runs_s))
    if state.delay_s is None:
        assert short_at_the_end >= CRASHES_MAX - 1
    else:
        assert FIRST_DELAY_S <= state.delay_s <= DELAY_S_MAX
