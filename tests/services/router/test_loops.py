"""The compiled loops against the same sums in Python's own numbers, up to the largest that they may meet."""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from services.router import loops
from services.router.board import Lines
from services.router.loops import DELAYED_JOBS, OCCUPANCY_US, OWN_US, PRICE_US, QUEUE_US, SERVICE_US
from services.router.pricing import Option, Pricing, Ways, Weights, recorded_lines, service_us
from services.router.roster import Roster
from shared.contracts.ids import WorkerId
from shared.model.compiled import kept_in
from shared.model.cost import Coefficients

COMPILED: Any = loops
DEGREES = (1, 2, 4, 8)
SECONDS = st.floats(0, 0.01)
TOKENS = st.one_of(st.integers(1, 2_000_000), st.integers(1, 2**26 - 1))


@st.composite
def priced_workers(draw: st.DrawFn) -> tuple[Pricing, list[tuple[int, int, int, int, int, int]]]:
    """A prompt, and of each worker its degree, what is cached there, the time of a fetch, what is ahead, how many are delayed,
    and its ratio."""
    numbers = {name: draw(SECONDS) for name in ("d", "a", "b", "c", "g")}
    coefficients = Coefficients(version="x", alpha=draw(st.floats(0, 1e-8)), **numbers)
    prompt_tokens = draw(TOKENS)
    worker = st.tuples(
        st.sampled_from(DEGREES), st.integers(0, prompt_tokens - 1), st.integers(0, 10**9), st.integers(0, 2**45),
        st.integers(0, 1_000), st.integers(62_500, 16_000_000),
    )  # fmt: skip
    workers = draw(st.lists(worker, min_size=1, max_size=6))
    roster = Roster((WorkerId(f"n0/1/{row}"), each[0]) for row, each in enumerate(workers))
    weights = Weights("vertumnus", draw(st.floats(1, 100)), draw(st.floats(0, 10)), draw(st.booleans()))
    lines = recorded_lines(Lines.empty(roster), *zip(*(each[3:] for each in workers), strict=True))
    return Pricing(coefficients, prompt_tokens, weights, roster, roster.smallest, lines, 0, True, True), workers


@given(priced_workers())
def test_every_price_is_that_of_the_formula_in_whole_numbers(asked: tuple[Pricing, list[tuple[int, ...]]]) -> None:
    pricing, workers = asked
    options = [Option(row, each[1], each[2]) for row, each in enumerate(workers)]
    cost_CW = pricing.of(Ways(np.zeros(0, np.int64), pending_OC=np.array(options))).cost_CW
    smallest, by, tokens = pricing.smallest, pricing.weights, pricing.prompt_tokens
    for row, (degree, cached, fetch_us, queue_us, jobs, ratio_ppm) in enumerate(workers):
        others_ppm = 1_000_000 if by.ratio_in_own_time else ratio_ppm
        own_us, taken_us, smallest_us = (
            service_us(pricing.coefficients, at, tokens, cached, ppm) + fetch_us
            for at, ppm in ((degree, ratio_ppm), (degree, others_ppm), (smallest, others_ppm))
        )
        occupancy_us = round(by.lam * (degree * taken_us - smallest * smallest_us))
        without_us = round(by.beta * own_us) + occupancy_us
        if by.ratio_in_own_time:
            without_us = own_us + round((by.beta - 1) * taken_us) + occupancy_us
        found = cost_CW[[QUEUE_US, DELAYED_JOBS, SERVICE_US, OCCUPANCY_US, OWN_US, PRICE_US], row].tolist()
        price_us = queue_us + without_us + jobs * own_us
        assert found == [queue_us, jobs, own_us, occupancy_us, without_us, price_us]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(DEGREES), st.booleans()), min_size=1),
    st.integers(0, 5),
)
def test_the_winner_then_the_best_of_every_other_degree_then_the_next(
    workers: list[tuple[int, int, int, bool]], runners_up: int
) -> None:
    cost_CW = np.zeros((loops.COST_COLUMNS, len(workers)), np.int64)
    cost_CW[[PRICE_US, loops.TIE_US]] = np.array([each[:2] for each in workers]).T
    cost_CW[OWN_US] = cost_CW[PRICE_US]
    degree_W = np.array([each[2] for each in workers])
    rows_O = np.flatnonzero([each[3] for each in workers])
    if not len(rows_O):
        return
    cost_CW[loops.ROW] = range(len(workers))
    told_TC, preferred = loops.ranked(cost_CW, degree_W, rows_O, runners_up)
    order = sorted(rows_O.tolist(), key=lambda row: (*workers[row][:2], row))
    leaders = [row for at, row in enumerate(order) if degree_W[row] not in degree_W[order[:at]]]
    assert told_TC[:, loops.ROW].tolist() == [*leaders, *[row for row in order if row not in leaders][:runners_up]]
    assert preferred == min((workers[row][0], workers[row][2]) for row in rows_O.tolist())[1]


def test_what_a_record_says_of_a_line_is_not_looked_up() -> None:
    roster = Roster([(WorkerId("n0/1/0"), 4)])
    lines = recorded_lines(Lines.empty(roster), [7], [2**40], [1_000_000])
    assert loops.ahead(0, 5, True, 0, *lines) == (7, 2**40)
    assert loops.ahead(0, 5, False, 0, *Lines.empty(roster)) == (0, 0)


def test_no_operations_are_fused() -> None:
    """A multiplication and an addition in one round once: on another processor they would round twice."""
    compiled: Any = njit(COMPILED.costs.signatures[0], error_model="numpy")(COMPILED.costs.py_func)
    [text] = compiled.inspect_asm().values()
    assert re.search(r"\bv?mulsd|\bfmul", text), "this is not what was looked for"
    assert not re.findall(r"\bvfn?m(?:add|sub)\w*|\bfn?m(?:add|sub|la|ls)\b", text)


def test_where_nothing_can_be_kept_every_process_compiles_for_itself() -> None:
    show = "from services.router import loops; from shared.model.compiled import kept_in; print(kept_in(loops.costs))"
    nowhere = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    told = subprocess.run([sys.executable, "-c", show], env=nowhere, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "None"
    assert kept_in(loops.costs) is not None
