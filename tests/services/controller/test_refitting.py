"""Coefficients fitted anew: when, to what, and when not."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_driving import pool_of

from services.controller import decider, refitting
from services.controller.refitting import DEGREE_SAMPLES_MIN, SAMPLES_MIN
from shared.contracts.events import CalibrationUpdated, ParametersChanged, PrefillCompleted, RouterRegistered
from shared.contracts.ids import NodeId, RequestId, RouterId, worker_id
from shared.model.cost import Coefficients
from tests.replay.test_verifying import verified
from tests.support.story import Story, adopted, committed, registered

GIVEN = Coefficients(version="c", d=0.01, a=1e-5, b=0.0, c=1e-4, alpha=1e-9, g=0.0)
TRUE = Coefficients(version="t", d=0.02, a=2e-5, b=1e-6, c=2e-4, alpha=2e-9, g=0.004)
"""Twice as dear, and every further rank costs 4 ms."""

WORKERS = {1: 0, 2: 2, 4: 4}
SHAPES = tuple(product((64, 300, 1_000, 3_000, 9_000, 30_000), (0, 100, 2_000, 20_000)))


class Controller:
    """One, of a node with workers of degree 1, 1, 2 and 4, and a router that was started with `GIVEN`."""

    def __init__(
        self, *, refit: bool = True, version: str = "c", given: Coefficients = GIVEN, chunk_tokens: int | None = None
    ) -> None:
        self.state = decider.initial()
        self.story = Story(lambda stored: decider.evolve(self.state, stored))
        self.story.tell(
            ParametersChanged(parameters_version=1, changes={"refit": refit}, asked_by="ops"),
            RouterRegistered(router=RouterId("r"), coefficients=given.model_dump()),
            registered(epoch=1, composition=(1, 1, 2, 4)).model_copy(
                update={"coefficients_version": version, "chunk_tokens": chunk_tokens}
            ),
            *adopted(),
            committed(composition=(1, 1, 2, 4)),
        )

    def prefill(
        self, degree: int, R: int, P: int, seconds: float, predicted_us: int | None = None, steps: int = 1
    ) -> None:
        alone_us = GIVEN.prefill_us(degree, R, P)
        self.story.tell(
            PrefillCompleted(
                request=RequestId("r"), attempt=1, worker=worker_id(NodeId("n0"), 1, WORKERS[degree]), node_epoch=1,
                computed_tokens=R, cached_own_tokens=P, queue_us=0, prefill_us=round(seconds * 1e6), steps=steps,
                predicted_us=alone_us if predicted_us is None else predicted_us,
            )
        )  # fmt: skip

    def measure(self, truth: Coefficients, degrees: tuple[int, ...] = (1, 2, 4), noise: float = 0.0) -> None:
        chance = random.Random(3)
        for degree, (R, P) in product(degrees, SHAPES):
            exact = truth.prefill_us(degree, R, P) / 1e6
            self.prefill(degree, R, P, exact * chance.uniform(1 - noise, 1 + noise))

    def decided(self) -> CalibrationUpdated | None:
        found = decider.refit(self.state)
        assert len(found) <= 1
        return found[0] if found else None  # type: ignore[return-value]


def test_a_set_that_errs_is_replaced_by_what_was_measured() -> None:
    controller = Controller()
    controller.measure(TRUE, noise=0.02)
    told = controller.decided()
    assert told is not None
    assert told.samples == 3 * len(SHAPES)
    assert told.to_seq == controller.state.seen_seq
    assert told.error_before > 0.4
    assert told.error_after < 0.03
    fitted = Coefficients.model_validate(told.coefficients)
    assert fitted.version == f"c+{told.to_seq}"
    for degree, R, P in ((1, 500, 0), (2, 5_000, 5_000), (4, 20_000, 1_000), (4, 100, 0)):
        assert fitted.prefill_us(degree, R, P) == pytest.approx(TRUE.prefill_us(degree, R, P), rel=0.05)


def test_error_before_is_the_mean_relative_error_of_the_set_that_priced() -> None:
    """Everything takes exactly twice its prediction: off by half of what was measured, and a fit is off by nothing."""
    controller = Controller()
    controller.measure(GIVEN.scaled(2))
    told = controller.decided()
    assert told is not None
    assert told.error_before == pytest.approx(0.5, abs=1e-4)
    assert told.error_after == pytest.approx(0, abs=1e-3)


def test_new_coefficients_need_new_evidence_and_follow_one_another() -> None:
    controller = Controller()
    controller.measure(TRUE)
    first = controller.decided()
    assert first is not None
    controller.story.tell(first)
    assert controller.decided() is None
    assert not controller.state.evidence.cells
    controller.measure(TRUE)
    assert controller.decided() is None, "what is measured is what is predicted now"
    controller.measure(GIVEN)
    again = controller.decided()
    assert again is not None
    assert again.coefficients["version"] == f"c+{again.to_seq}"


def test_only_if_operators_let_it() -> None:
    controller = Controller(refit=False)
    controller.measure(TRUE)
    assert controller.decided() is None


def test_the_noise_of_a_right_set_is_no_reason() -> None:
    controller = Controller()
    controller.measure(GIVEN, noise=0.25)
    assert controller.decided() is None


def test_one_degree_cannot_tell_what_is_divided_by_it() -> None:
    controller = Controller()
    for _ in range(4):
        controller.measure(TRUE, degrees=(4,))
    assert len(controller.state.evidence.samples) >= SAMPLES_MIN
    assert controller.decided() is None
    for R, P in SHAPES[:DEGREE_SAMPLES_MIN]:
        controller.prefill(1, R, P, TRUE.prefill_us(1, R, P) / 1e6)
    assert controller.decided() is not None


def test_too_few_prefills_are_no_evidence() -> None:
    controller = Controller()
    for degree, (R, P) in [*product((1, 2, 4), SHAPES)][: SAMPLES_MIN - 1]:
        controller.prefill(degree, R, P, TRUE.prefill_us(degree, R, P) / 1e6)
    assert controller.decided() is None
    controller.prefill(4, 30_000, 20_000, TRUE.prefill_us(4, 30_000, 20_000) / 1e6)
    assert controller.decided() is not None


def test_a_prefill_that_shared_a_step_is_no_evidence_and_one_of_several_steps_is() -> None:
    controller = Controller(chunk_tokens=400)
    alone_us = GIVEN.prefill_us(1, 1_000, 0)
    controller.prefill(1, 1_000, 0, 1.0, predicted_us=alone_us - 5_000)
    controller.prefill(1, 1_000, 0, 1.0, predicted_us=0)
    controller.prefill(1, 1_000, 0, 1.0, predicted_us=alone_us - 1)
    controller.prefill(1, 1_000, 0, 0.5, predicted_us=alone_us + 10_000, steps=2)
    assert not controller.state.evidence.samples, "the node would have made three steps of it"
    controller.prefill(1, 1_000, 0, 0.5, predicted_us=alone_us + 2 * 10_000, steps=3)
    [sample] = controller.state.evidence.samples
    assert sample.seconds == pytest.approx(0.5 * alone_us / (alone_us + 20_000), rel=1e-4)


def test_a_chunk_has_those_before_it_as_cached_tokens() -> None:
    """Blocks of 100, chunks of 400, 1,000 tokens behind 20: to 400, 800 and 1,020. b costs 1 µs for each cached token."""
    given = GIVEN.model_copy(update={"b": 1e-6})
    controller = Controller(given=given, chunk_tokens=400)
    predicted_us = sum(given.prefill_us(2, R, P) for R, P in ((380, 20), (400, 400), (220, 800)))
    whole_us = given.prefill_us(2, 1_000, 20)
    assert predicted_us == pytest.approx(whole_us + 2 * 10_000 + 400 + 800, abs=3)
    controller.prefill(2, 1_000, 20, 2 * predicted_us / 1e6, predicted_us=whole_us + 2 * 10_000, steps=3)
    assert not controller.state.evidence.samples, "something else was in its steps"
    controller.prefill(2, 1_000, 20, 2 * predicted_us / 1e6, predicted_us=predicted_us, steps=3)
    [sample] = controller.state.evidence.samples
    assert sample.seconds == pytest.approx(2 * whole_us / 1e6, rel=1e-3)


def test_what_would_change_a_price_beyond_the_bound_is_not_adopted() -> None:
    controller = Controller()
    controller.measure(GIVEN.scaled(4.5))
    assert controller.state.evidence.samples
    assert controller.decided() is None


def test_a_node_with_another_set_and_a_single_outlier_say_nothing() -> None:
    controller = Controller(version="x")
    controller.measure(TRUE)
    assert not controller.state.evidence.samples
    controller = Controller()
    controller.prefill(1, 1_000, 0, 60.0)
    assert not controller.state.evidence.samples


def test_what_no_set_may_say_is_not_adopted() -> None:
    """A constant of 3,700 s, where 3,600 are the limit of a coefficient."""
    controller = Controller()
    hours = Coefficients(version="c", d=2_000, a=1e-5, b=0, c=1e-4, alpha=1e-9)
    controller.story.tell(RouterRegistered(router=RouterId("q"), coefficients=hours.model_dump()))
    for degree, (R, P) in product((1, 2, 4), SHAPES):
        alone_us = hours.prefill_us(degree, R, P)
        controller.prefill(degree, R, P, alone_us / 1e6 * 1.85, predicted_us=alone_us)
    assert len(controller.state.evidence.samples) >= SAMPLES_MIN
    assert controller.decided() is None


def test_evidence_is_bounded_however_many_shapes_there_are() -> None:
    controller = Controller()
    for degree, R, P in product((1, 2, 4), range(16), range(16)):
        controller.prefill(degree, 1 << R, 1 << P, GIVEN.prefill_us(degree, 1 << R, 1 << P) / 1e6)
    assert len(controller.state.evidence.cells) == refitting.CELLS_MAX


def test_who_starts_on_what_was_kept_knows_the_set_that_prices() -> None:
    """Of a log that has dropped its beginning, the fit is kept before the routers that have come since."""
    controller = Controller()
    controller.measure(TRUE)
    told = controller.decided()
    assert told is not None
    controller.story.tell(told, RouterRegistered(router=RouterId("r"), coefficients=GIVEN.model_dump()))
    later = decider.initial()
    for stored in controller.state.keepsake.kept.values():
        decider.evolve(later, stored._replace(kept=True))
    assert later.evidence.current == controller.state.evidence.current == Coefficients.model_validate(told.coefficients)
    assert later.evidence.given == GIVEN


def test_routers_that_are_started_with_another_set_are_judged_by_it() -> None:
    controller = Controller(version="x")
    controller.measure(TRUE)
    controller.story.tell(
        RouterRegistered(router=RouterId("q"), coefficients=TRUE.model_copy(update={"version": "x"}).model_dump())
    )
    evidence = controller.state.evidence
    assert evidence.current == evidence.given == TRUE.model_copy(update={"version": "x"})
    for degree, (R, P) in product((1, 2, 4), SHAPES):
        seconds = TRUE.prefill_us(degree, R, P) / 1e6
        controller.prefill(degree, R, P, seconds, predicted_us=TRUE.prefill_us(degree, R, P))
    assert len(evidence.samples) == 3 * len(SHAPES)
    assert controller.decided() is None


def test_a_prefill_that_is_predicted_to_take_no_time_is_no_evidence() -> None:
    free = Coefficients(version="c", d=0, a=0, b=0, c=1e-7, alpha=0)
    controller = Controller()
    controller.story.tell(RouterRegistered(router=RouterId("q"), coefficients=free.model_dump()))
    controller.prefill(1, 1, 0, 0.001, predicted_us=1, steps=2)
    assert not controller.state.evidence.samples


async def test_a_leader_tells_it_when_a_window_closes_and_it_comes_out_again() -> None:
    pool = await pool_of((4, 2, 2))
    asker = decider.Asker("ops", "")
    await pool.leadership.decide(lambda: decider.change_parameters(pool.controller.state, {"refit": True}, asker))
    pool.agent.record([RouterRegistered(router=RouterId("r"), coefficients=GIVEN.model_dump())])
    for degree, (R, P) in product((2, 4), SHAPES + SHAPES):
        done = PrefillCompleted(
            request=RequestId("r"), attempt=1, worker=worker_id(NodeId("n0"), 1, {4: 0, 2: 4}[degree]), node_epoch=1,
            computed_tokens=R, cached_own_tokens=P, queue_us=0, prefill_us=TRUE.prefill_us(degree, R, P),
            predicted_us=GIVEN.prefill_us(degree, R, P),
        )  # fmt: skip
        pool.agent.record([done])
    await pool.live(21)
    [told] = pool.all(CalibrationUpdated)
    assert isinstance(told, CalibrationUpdated)
    assert told.samples == 4 * len(SHAPES)
    await pool.live(40)
    assert pool.all(CalibrationUpdated) == [told]
    found = verified(pool.log_of)
    assert found.checked["calibration-updated"] == 1
    assert found.differences == []


PREFILLS = st.lists(
    st.tuples(st.sampled_from((1, 2, 4)), st.integers(1, 60_000), st.integers(0, 60_000), st.floats(0.3, 6)),
    min_size=SAMPLES_MIN, max_size=120,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(PREFILLS)
def test_whatever_is_measured_a_new_set_is_bounded_better_and_decided_once(
    prefills: list[tuple[int, int, int, float]],
) -> None:
    controller = Controller()
    for degree, R, P, ratio in prefills:
        controller.prefill(degree, R, P, ratio * GIVEN.prefill_us(degree, R, P) / 1e6)
    evidence = controller.state.evidence
    assert all(len(cell) <= refitting.SAMPLES_PER_CELL for cell in evidence.cells.values())
    told = controller.decided()
    if told is None:
        return
    assert controller.decided() == told, "a decision is safe to repeat"
    assert told.error_after <= refitting.ERROR_SHARE_MAX * told.error_before
    fitted = Coefficients.model_validate(told.coefficients)
    for degree, asked in product({each.degree for each in evidence.samples}, refitting.ASKED):
        ratio = fitted.prefill_us(degree, *asked) / GIVEN.prefill_us(degree, *asked)
        assert 1 / refitting.CHANGE_MAX <= ratio <= refitting.CHANGE_MAX
    controller.story.tell(told)
    assert evidence.current == fitted
    assert controller.decided() is None
