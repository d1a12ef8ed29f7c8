"""Arrivals through a pool that is not there, on many pools at once: the kernel of a forecast.

A *lane* is one pool at one rate; every array has a lane in its first axis and a worker in its second. Each worker serves one
prompt at a time, from empty queues on; the first tenth of the arrivals warms up and is not counted. The rule is the live one:

    J = q + β·s + λ·(C·s - C_min·s_min)      q: what is left of the running prompt, and what waits

and waiting prompts are taken in order of arrival, or the shortest first. Not replayed are packing, chunks, stealing, fetches,
and that cache hits change with the composition: P is as it was. All times are whole microseconds, so every machine gets the
same scores.
"""

import numpy as np
import numpy.typing as npt

from services.controller.forecast import PPM, Question, Replayed

RATES_PERCENT = (90, 110, 130)
RATIO_PPM_MAX = 3 * PPM
WARM_SHARE = 10
"""One in so many arrivals warms up."""

WAITING_MAX = 32
"""Prompts that wait at one worker; one more is refused there, and counts as if it waited for all of them."""

FOREVER = np.int64(2**62)
ABSENT = np.int64(2**50)
"""The price of a worker that a lane does not have, microseconds."""

Ints = npt.NDArray[np.int64]


def scores_ppm(question: Question) -> tuple[int, ...]:
    """One for each pool: the mean over the rates of its mean TTFT over the best pool's, at most 3, in millionths."""
    totals = _Lanes(question).run().reshape(len(RATES_PERCENT), len(question.pools))
    ratios = np.minimum(RATIO_PPM_MAX, totals * PPM // np.maximum(1, totals.min(axis=1, keepdims=True)))
    return tuple(int(each) for each in ratios.sum(axis=0) // len(RATES_PERCENT))


class _Lanes:
    """`until_LW` is when each worker is done with what runs; `waiting_LWK` and `came_LWK` are service and arrival of what
    waits there, `FOREVER` where nothing does; the lowest of `key_LWK` is served next, and no two keys are equal."""

    def __init__(self, question: Question) -> None:
        self._question = question
        pools = question.pools * len(RATES_PERCENT)
        width = max(map(len, pools))
        self._degrees_LW = np.array([(*pool, *(0,) * (width - len(pool))) for pool in pools], dtype=np.int64)
        self._present_LW = self._degrees_LW > 0
        self._rate_L = np.repeat(np.array(RATES_PERCENT, dtype=np.int64), len(question.pools))
        self._smallest_L = np.where(self._present_LW, self._degrees_LW, 99).min(axis=1)
        self._lanes = np.arange(len(pools))
        self._until_LW = np.zeros(self._degrees_LW.shape, dtype=np.int64)
        self._waiting_LWK = np.full((*self._degrees_LW.shape, WAITING_MAX), FOREVER)
        self._came_LWK = np.full_like(self._waiting_LWK, FOREVER)
        self._key_LWK = np.full_like(self._waiting_LWK, FOREVER)
        self._backlog_LW = np.zeros_like(self._until_LW)
        self._total_L = np.zeros(len(pools), dtype=np.int64)
        self._cold_us = 0

    def run(self) -> Ints:
        """Summed TTFT of each lane, for the arrivals that count."""
        arrivals = self._question.arrivals
        warm = arrivals[len(arrivals) // WARM_SHARE :]
        self._cold_us = warm[0].time_us if warm else 0
        for number, each in enumerate(arrivals):
            now_L = each.time_us * 100 // self._rate_L
            self._serve(now_L)
            self._place(number, each, now_L)
        self._serve(np.full(len(self._lanes), FOREVER // 2))
        return self._total_L

    def _place(self, number: int, each: Replayed, now_L: Ints) -> None:
        question = self._question
        of_degree = np.zeros(int(self._degrees_LW.max()) + 1, dtype=np.int64)
        for degree in np.unique(self._degrees_LW[self._present_LW]):
            of_degree[degree] = question.coefficients.prefill_us(int(degree), each.uncached_tokens, each.cached_tokens)
        service_LW = of_degree[self._degrees_LW]
        queue_LW = np.maximum(0, self._until_LW - now_L[:, None]) + self._backlog_LW
        least_L = self._smallest_L * of_degree[self._smallest_L]
        occupancy_LW = np.rint(question.lam * (self._degrees_LW * service_LW - least_L[:, None])).astype(np.int64)
        price_LW = queue_LW + np.rint(question.beta * service_LW).astype(np.int64) + occupancy_LW
        chosen_L = np.where(self._present_LW, price_LW, ABSENT).argmin(axis=1)
        at = self._lanes, chosen_L
        slot_L = self._waiting_LWK[at].argmax(axis=1)
        full_L = self._waiting_LWK[(*at, slot_L)] != FOREVER
        taken = self._lanes[~full_L], chosen_L[~full_L]
        self._waiting_LWK[(*taken, slot_L[~full_L])] = service_LW[taken]
        self._came_LWK[(*taken, slot_L[~full_L])] = now_L[~full_L]
        first_LW = service_LW * len(question.arrivals) if question.shortest_first else np.zeros_like(service_LW)
        self._key_LWK[(*taken, slot_L[~full_L])] = first_LW[taken] + number
        self._backlog_LW[taken] += service_LW[taken]
        if each.time_us >= self._cold_us:
            self._total_L[full_L] += (queue_LW[at] + service_LW[at])[full_L]
        self._serve(now_L)

    def _serve(self, now_L: Ints) -> None:
        """Every worker that is free before `now` takes what waits, one after the other."""
        cold_L = self._cold_us * 100 // self._rate_L
        while True:
            lanes, workers = np.nonzero((self._until_LW <= now_L[:, None]) & (self._backlog_LW > 0))
            if not len(lanes):
                return
            slots = self._key_LWK[lanes, workers].argmin(axis=1)
            at = lanes, workers, slots
            service, came = self._waiting_LWK[at], self._came_LWK[at]
            done = np.maximum(self._until_LW[lanes, workers], came) + service
            self._until_LW[lanes, workers] = done
            self._backlog_LW[lanes, workers] -= service
            self._waiting_LWK[at] = self._came_LWK[at] = self._key_LWK[at] = FOREVER
            counts = came >= cold_L[lanes]
            np.add.at(self._total_L, lanes[counts], (done - came)[counts])
