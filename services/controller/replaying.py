"""Arrivals through a pool that is not there, on many pools at once: the kernel of a forecast.

A *lane* is one pool at one rate. Each worker serves one prompt at a time, from empty queues on; the first tenth of the arrivals
warms up and is not counted. The rule is the live one:

    J = q + delayed·s + β·s + λ·(C·s - C_min·s_min)

Under `paper` q is what is left of the running prompt and all that waits, and nobody is delayed. Where the live rule knows the
order of a queue, q is only what will be served before, and whoever waits behind is delayed. An adaptive β follows the lane's
own load. Not replayed are packing, chunks, stealing, fetches, and that cache hits change with the composition: P is as it was.
All times are whole microseconds, so every machine gets the same scores.
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np

from services.controller.forecast import PPM, Question, Scores
from shared.model.compiled import compiled
from shared.model.cost import Ints
from shared.model.parameters import LOAD_PPM_MAX, LOAD_WINDOW_S

RATES_PERCENT = (95, 105, 115)
"""Around the rate at which replays compare pools as these then compared in fact (ADR 39)."""

RATIO_PPM_MAX = 3 * PPM
WARM_SHARE = 10
"""One in so many arrivals warms up."""

PARTS = 10
"""The counted arrivals are compared part by part, in so many of equal numbers: chance differs from part to part."""

WAITING_MAX = 16
"""Prompts that wait at one worker; one more is refused there, and counts as if it waited for all of them."""

FOREVER = 2**50
"""Microseconds; 35 years."""


def scores(question: Question) -> Scores:
    """For each pool the mean over the rates of its mean TTFT over the best pool's, at most 3, in millionths; and the standard
    error of its difference from the first pool's, by what the parts say for themselves."""
    ttft_ARP = replayed(question)
    counted_ARP = ttft_ARP[len(ttft_ARP) // WARM_SHARE :]
    totals_RP = counted_ARP.sum(axis=0)
    best_R1 = np.maximum(1, totals_RP.min(axis=1, keepdims=True))
    ratios_RP = np.minimum(RATIO_PPM_MAX, totals_RP * PPM // best_R1)
    parts_BRP = np.array([part.sum(axis=0) for part in np.array_split(counted_ARP, PARTS)])
    changes_BRP = (parts_BRP - parts_BRP[:, :, :1]) * PPM // best_R1
    changes_BP = changes_BRP.clip(-RATIO_PPM_MAX, RATIO_PPM_MAX).sum(axis=1) // len(RATES_PERCENT)
    return Scores(
        tuple(int(each) for each in ratios_RP.sum(axis=0) // len(RATES_PERCENT)),
        tuple(_error(changes) for changes in changes_BP.T.tolist()),
    )


def _error(parts: list[int]) -> int:
    """The standard error of the sum of the parts."""
    mean = sum(parts) // len(parts)
    return isqrt(len(parts) * sum((each - mean) ** 2 for each in parts) // (len(parts) - 1))


def replayed(question: Question, rates_percent: Sequence[int] = RATES_PERCENT) -> Ints:
    """TTFT in microseconds of each arrival at each rate in each pool: shape (arrivals, rates, pools)."""
    time_A = np.array([each.time_us for each in question.arrivals], dtype=np.int64)
    service_AC = _services(question)
    ttft_RPA = np.array(
        [
            [
                _lane(time_A, service_AC, np.array(pool, dtype=np.int64), percent, *question.rule)
                for pool in question.pools
            ]
            for percent in rates_percent
        ]
    )
    return ttft_RPA.transpose(2, 0, 1)


def _services(question: Question) -> Ints:
    """What each arrival takes at each degree; a column for every number up to the largest degree."""
    uncached_A = np.array([each.uncached_tokens for each in question.arrivals], dtype=np.float64)
    cached_A = np.array([each.cached_tokens for each in question.arrivals], dtype=np.float64)
    degree_C = np.arange(1, max(map(max, question.pools)) + 1, dtype=np.float64)
    served_AC = question.coefficients.prefills_us(degree_C, uncached_A[:, None], cached_A[:, None])
    return np.pad(served_AC, ((0, 0), (1, 0)))


@compiled("int64[::1](int64[::1], int64[:, ::1], int64[::1], int64, float64, float64, boolean, boolean, boolean)")
def _lane(
    time_A: Ints, service_AC: Ints, degree_W: Ints, percent: int,
    beta: float, lam: float, shortest_first: bool, adaptive: bool, ordered: bool,
) -> Ints:  # fmt: skip
    """TTFT of each arrival in one pool, `percent` as fast as they came; the last five are the rule.

    Axes: W workers, K places to wait, A arrivals. `until_W` is when each worker is done with what runs. Who waits there is in
    the first `waiting_W` places, in order of arrival. `given_A` sums up what the first arrivals were predicted to take.
    """
    arrivals, workers = len(time_A), len(degree_W)
    came_A = time_A * 100 // percent
    until_W, waiting_W, backlog_W = (
        np.zeros(workers, np.int64),
        np.zeros(workers, np.int64),
        np.zeros(workers, np.int64),
    )
    who_WK = np.zeros((workers, WAITING_MAX), np.int64)
    service_WK = np.zeros((workers, WAITING_MAX), np.int64)
    given_A, ttft_A = np.zeros(arrivals + 1, np.int64), np.zeros(arrivals, np.int64)
    smallest = degree_W.min()
    begin = end = 0

    def serve(worker: int, now_us: int) -> None:
        """If it is free before `now`, it takes what waits, one after the other."""
        while waiting_W[worker] and until_W[worker] <= now_us:
            place = 0
            for other in range(1, waiting_W[worker] if shortest_first else 0):
                if service_WK[worker, other] < service_WK[worker, place]:
                    place = other
            number, service_us = who_WK[worker, place], service_WK[worker, place]
            waiting_W[worker] -= 1
            backlog_W[worker] -= service_us
            for later in range(place, waiting_W[worker]):
                who_WK[worker, later], service_WK[worker, later] = (
                    who_WK[worker, later + 1],
                    service_WK[worker, later + 1],
                )
            until_W[worker] = max(until_W[worker], came_A[number]) + service_us
            ttft_A[number] = until_W[worker] - came_A[number]

    for number in range(arrivals):
        now_us = came_A[number]
        if adaptive:
            # Given in the last whole seconds; the first one, when there was none, counts as one.
            second = now_us // PPM
            while came_A[begin] < (second - LOAD_WINDOW_S) * PPM:
                begin += 1
            while came_A[end] < second * PPM:
                end += 1
            load_ppm = (given_A[end] - given_A[begin]) // min(max(second, 1), LOAD_WINDOW_S) // workers
            beta = PPM / (PPM - min(load_ppm, LOAD_PPM_MAX))
        smallest_us = service_AC[number, smallest]
        best, best_us = -1, 0
        for worker in range(workers):
            serve(worker, now_us)
            service_us = service_AC[number, degree_W[worker]]
            queue_us = max(0, until_W[worker] - now_us)
            if not ordered:
                queue_us += backlog_W[worker]
            for place in range(waiting_W[worker] if ordered else 0):
                queue_us += min(service_WK[worker, place], service_us)
            occupancy_us = degree_W[worker] * service_us - smallest * smallest_us
            price_us = queue_us + np.int64(np.rint(beta * service_us) + np.rint(lam * occupancy_us))
            if best < 0 or price_us < best_us:
                best, best_us = worker, price_us
        service_us = service_AC[number, degree_W[best]]
        given_A[number + 1] = given_A[number] + service_us
        place = waiting_W[best]
        if place == WAITING_MAX:
            ttft_A[number] = max(0, until_W[best] - now_us) + backlog_W[best] + service_us
        else:
            who_WK[best, place], service_WK[best, place] = number, service_us
            backlog_W[best] += service_us
            waiting_W[best] += 1
            serve(best, now_us)
    for worker in range(workers):
        serve(worker, FOREVER)
    return ttft_A
