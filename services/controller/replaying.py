"""Arrivals through a pool that is not there, on many pools at once: the kernel of a forecast.

A *lane* is one pool at one rate. The workers of all lanes stand in one axis, lane behind lane. Each worker serves one prompt
at a time, from empty queues on; the first tenth of the arrivals warms up and is not counted. The rule is the live one:

    J = q + delayed·s + β·s + λ·(C·s - C_min·s_min)

Under `paper` q is what is left of the running prompt and all that waits, and nobody is delayed. Where the live rule knows the
order of a queue, q is only what will be served before, and whoever waits behind is delayed. An adaptive β follows the lane's
own load. Not replayed are packing, chunks, stealing, fetches, and that cache hits change with the composition: P is as it was.
All times are whole microseconds, so every machine gets the same scores.
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt

from services.controller.forecast import PPM, Question, Scores
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

FOREVER = np.int64(2**50)
"""Microseconds; 35 years."""

NOBODY = -1


def replayed(question: Question, rates_percent: Sequence[int] = RATES_PERCENT) -> Ints:
    """TTFT in microseconds of each arrival at each rate in each pool: shape (arrivals, rates, pools)."""
    return _Lanes(question, rates_percent).run()


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


class _Lanes:
    """Axes: L lanes, by rate and then by pool; N workers of all lanes; K places to wait; A arrivals; R rates; P pools.

    `until_N` is when each worker is done with what runs; `who_NK` is the number of the arrival in each place, or `NOBODY`,
    and `service_NK` its service, or `FOREVER`. `given_RPA` sums up what the first arrivals were predicted to take.
    """

    def __init__(self, question: Question, rates_percent: Sequence[int]) -> None:
        self._question, self._rule, self._rates = question, question.rule, rates_percent
        lanes = question.pools * len(self._rates)
        sizes_L = [len(pool) for pool in lanes]
        self._sizes_L = np.array(sizes_L, dtype=np.int64)
        self._first_L = np.cumsum([0, *sizes_L[:-1]])
        self._lane_N = np.repeat(np.arange(len(lanes)), sizes_L)
        self._degree_N = np.array([degree for pool in lanes for degree in pool], dtype=np.int64)
        self._smallest_N = np.array([min(pool) for pool in lanes], dtype=np.int64)[self._lane_N]
        rate_L = np.repeat(np.array(self._rates, dtype=np.int64), len(question.pools))
        self._rate_N = rate_L[self._lane_N]
        self._time_A = np.array([each.time_us for each in question.arrivals], dtype=np.int64)
        self._service_AC = self._services()
        self._until_N = np.zeros(len(self._degree_N), dtype=np.int64)
        self._who_NK = np.full((len(self._degree_N), WAITING_MAX), NOBODY)
        self._service_NK = np.full(self._who_NK.shape, FOREVER)
        self._backlog_N = np.zeros_like(self._until_N)
        self._waiting_N = np.zeros_like(self._until_N)
        arrivals, shape = len(self._time_A), (len(self._rates), len(question.pools))
        self._given_RPA = np.zeros((*shape, arrivals + 1), dtype=np.int64)
        self._seconds = [_last_seconds(self._time_A * 100 // rate) for rate in self._rates]
        self._ttft_AL = np.zeros((arrivals, len(lanes)), dtype=np.int64)

    def _services(self) -> Ints:
        """What each arrival takes at each degree; a column for every number up to the largest degree."""
        arrivals = self._question.arrivals
        uncached_A = np.array([each.uncached_tokens for each in arrivals], dtype=np.float64)
        cached_A = np.array([each.cached_tokens for each in arrivals], dtype=np.float64)
        degree_C = np.arange(1, int(self._degree_N.max()) + 1, dtype=np.float64)
        served_AC = self._question.coefficients.prefills_us(degree_C, uncached_A[:, None], cached_A[:, None])
        return np.pad(served_AC, ((0, 0), (1, 0)))

    def run(self) -> Ints:
        """TTFT of each arrival at each rate in each pool."""
        for number, time_us in enumerate(self._time_A):
            now_N = time_us * 100 // self._rate_N
            self._serve(now_N)
            self._place(number, now_N)
            self._serve(now_N)
        self._serve(np.full(len(self._until_N), FOREVER // 2))
        return self._ttft_AL.reshape(-1, len(self._rates), len(self._question.pools))

    def _place(self, number: int, now_N: Ints) -> None:
        service_C = self._service_AC[number]
        service_N, smallest_N = service_C[self._degree_N], service_C[self._smallest_N]
        running_N = np.maximum(0, self._until_N - now_N)
        price_N = running_N + self._queue(service_N) + self._own(number, service_N, smallest_N)
        chosen_L = self._first_least(price_N)
        chosen_RP = service_N[chosen_L].reshape(self._given_RPA.shape[:2])
        self._given_RPA[:, :, number + 1] = self._given_RPA[:, :, number] + chosen_RP
        is_full_L = self._waiting_N[chosen_L] == WAITING_MAX
        taken = chosen_L[~is_full_L]
        place = (self._who_NK[taken] == NOBODY).argmax(axis=1)
        self._who_NK[taken, place], self._service_NK[taken, place] = number, service_N[taken]
        self._backlog_N[taken] += service_N[taken]
        self._waiting_N[taken] += 1
        refused = chosen_L[is_full_L]
        waits = running_N[refused] + self._backlog_N[refused] + service_N[refused]
        self._ttft_AL[number, self._lane_N[refused]] = waits

    def _queue(self, service_N: Ints) -> Ints:
        """What will be served before a newcomer, and his service for each whom he delays."""
        if not self._rule.ordered:
            return self._backlog_N
        # At most workers nobody waits: those where somebody does are the M whose places are looked at.
        queued = np.flatnonzero(self._waiting_N)
        service_M, service_MK = service_N[queued], self._service_NK[queued]
        ahead_MK = service_MK <= service_M[:, None]
        delayed_M = self._waiting_N[queued] - ahead_MK.sum(axis=1)
        queue_N = np.zeros_like(service_N)
        queue_N[queued] = np.where(ahead_MK, service_MK, 0).sum(axis=1) + delayed_M * service_M
        return queue_N

    def _own(self, number: int, service_N: Ints, smallest_N: Ints) -> Ints:
        """β·s and the price of extra GPUs."""
        occupancy_N = self._degree_N * service_N - self._smallest_N * smallest_N
        weighed_N = np.rint(self._beta(number) * service_N) + np.rint(self._rule.lam * occupancy_N)
        return weighed_N.astype(np.int64)

    def _beta(self, number: int) -> float | npt.NDArray[np.float64]:
        """Fixed, or by each lane's load over the last whole seconds, as routers have it."""
        if not self._rule.adaptive:
            return self._rule.beta
        given_RP = [
            (given_PA[:, end[number]] - given_PA[:, begin[number]]) // seconds[number]
            for given_PA, (begin, end, seconds) in zip(self._given_RPA, self._seconds, strict=True)
        ]
        load_L = np.concatenate(given_RP) // self._sizes_L
        return (PPM / (PPM - np.minimum(load_L, LOAD_PPM_MAX)))[self._lane_N]

    def _first_least(self, price_N: Ints) -> Ints:
        """The first of the cheapest workers of each lane."""
        least_L = np.minimum.reduceat(price_N, self._first_L)
        cheapest = np.flatnonzero(price_N == least_L[self._lane_N])
        lane = self._lane_N[cheapest]
        return cheapest[np.flatnonzero(np.diff(lane, prepend=NOBODY))]

    def _serve(self, now_N: Ints) -> None:
        """Every worker that is free before `now` takes what waits, one after the other."""
        while True:
            workers = np.flatnonzero((self._until_N <= now_N) & (self._waiting_N > 0))
            if not len(workers):
                return
            who = self._who_NK[workers]
            order = self._service_NK[workers] * len(self._time_A) if self._rule.shortest_first else 0
            place = np.where(who == NOBODY, FOREVER, order + who).argmin(axis=1)
            at = workers, place
            numbers, service = self._who_NK[at], self._service_NK[at]
            came = self._time_A[numbers] * 100 // self._rate_N[workers]
            done = np.maximum(self._until_N[workers], came) + service
            self._until_N[workers] = done
            self._backlog_N[workers] -= service
            self._waiting_N[workers] -= 1
            self._who_NK[at], self._service_NK[at] = NOBODY, FOREVER
            self._ttft_AL[numbers, self._lane_N[workers]] = done - came


def _last_seconds(time_A: Ints) -> tuple[Ints, Ints, Ints]:
    """For each arrival: which arrivals came in the last ten whole seconds before it, from and to, and how many of those seconds
    there were; the first second, when there was none, counts as one."""
    second_A = time_A // PPM
    begin = np.searchsorted(time_A, (second_A - LOAD_WINDOW_S) * PPM)
    return begin, np.searchsorted(time_A, second_A * PPM), second_A.clip(1, LOAD_WINDOW_S)
