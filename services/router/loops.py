"""The loops of a decision, compiled: what a request costs at every worker, in every way to serve it there, and who is cheapest.

Plain functions over `int64` arrays (`shared/model/compiled.py`). Floats are worked out as `Coefficients.prefill_us` does it.

Array names end in their axes: W workers, N places in a line, D depths of prefixes, O options, H holders, T candidates that are
told, C the columns below.
"""

import numpy as np

from services.router.lines import FOREVER
from services.router.roster import Bools
from shared.model.calibration import PPM
from shared.model.compiled import compiled
from shared.model.cost import PREFILL_US_MAX, US_PER_S, Ints

DEGREE, RATIO_PPM, WAITING_US, LATE_US, WAITING, LEFT_US, SIGN_NS, CHUNKED, FROM_NS, UNTIL_NS, HUNG_NS = range(11)
LINE_COLUMNS = 11
"""Of a worker's load: its degree, its measured over predicted time, the work that waits, the part of that which has waited too
long, how many others wait, the work that runs and its last sign, how many of those that run are done in chunks; from when until
when that is so, and from when on the worker is hung."""

ROW, KIND, OWN_TOKENS, CACHED_TOKENS, FETCH_US, QUEUE_US, DELAYED_JOBS, COUNTED_PPM = range(8)
SERVICE_US, OCCUPANCY_US, OWN_US, PRICE_US, TIE_US = range(8, 13)
COST_COLUMNS = 13
"""Of the cheapest way at a worker: whose it is, which it is, what is cached there and with it, the parts of its price with the
ratio that was counted, the price without queues, the price, and what decides between equal prices."""

OWN, IN_FLIGHT, FETCHED, PENDING = range(4)
"""The ways: with the worker's own blocks, with those that a request before this one leaves, with those of another worker, and
with what a split has left for it. An option has the columns of `pricing.Option`."""


@compiled("int64(UniTuple(float64, 6), int64, int64, int64, int64)")
def service_us(cost: tuple[float, ...], degree: int, prompt_tokens: int, cached_tokens: int, ratio_ppm: int) -> int:
    """s without a fetch: `Coefficients.prefill_us` times the worker's ratio. At least 1, for a reservation of nothing could not
    be told from none."""
    d, a, b, c, alpha, g = cost
    R, P = float(prompt_tokens - cached_tokens), float(cached_tokens)
    pairs = R * (R + (P + P + 1.0)) / 2.0
    shared = d + a * R + b * P + g * (degree - 1.0)
    divided = c * R + alpha * pairs
    predicted_us = int(max(min(np.rint((shared + divided / degree) * US_PER_S), float(PREFILL_US_MAX)), 1.0))
    # The product of all of it might not fit.
    return max(predicted_us // PPM * ratio_ppm + predicted_us % PPM * ratio_ppm // PPM, 1)


@compiled(
    "UniTuple(int64, 2)(int64, int64, boolean, int64, int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, :, ::1])"
)
def ahead(
    row: int, work_us: int, ordered: bool, now_ns: int, line_CW: Ints, works_NW: Ints, sums_NW: Ints, chunks_2NW: Ints
) -> tuple[int, int]:
    """What will be served at a worker before a request of so much work, and how many it delays: `Load.ahead` if the worker goes
    by the least work, `Load.at` otherwise."""
    elapsed_us = max(now_ns - line_CW[SIGN_NS, row], 0) // 1_000
    left_us = line_CW[LEFT_US, row]
    if not ordered:
        return line_CW[WAITING_US, row] + max(left_us - elapsed_us, elapsed_us >> 2), 0
    before, end = 0, min(line_CW[WAITING, row], len(works_NW))  # those of a record are counted, and not listed
    while before < end:
        middle = (before + end) >> 1
        if works_NW[middle, row] <= work_us:
            before = middle + 1
        else:
            end = middle
    delayed_jobs = line_CW[WAITING, row] - before
    # Whoever runs and has more left is overtaken after a chunk, and at most the longest chunk of them is being worked on.
    chunk_us = 0
    for place in range(line_CW[CHUNKED, row]):
        if chunks_2NW[0, place, row] > work_us:
            delayed_jobs += 1
            left_us -= chunks_2NW[0, place, row]
            chunk_us = max(chunk_us, chunks_2NW[1, place, row])
    left_us += chunk_us
    queue_us = sums_NW[before, row] + line_CW[LATE_US, row] + max(left_us - elapsed_us, elapsed_us >> 2)
    return queue_us, delayed_jobs


@compiled("int64[::1](int64[::1], int64[::1], int64, int64, int64)")
def cached(row_H: Ints, blocks_H: Ints, block_tokens: int, usable_tokens: int, workers: int) -> Ints:
    """P of each worker: of the blocks that a holder has as much as the prompt can use. Holders that are no workers have a row
    after the last."""
    cached_W = np.zeros(workers, np.int64)
    for holder in range(len(row_H)):
        if row_H[holder] < workers:
            cached_W[row_H[holder]] = min(blocks_H[holder] * block_tokens, usable_tokens)
    return cached_W


@compiled("int64(int64[::1], boolean[::1], int64[::1])")
def longest(cached_W: Ints, readable_W: Bools, rows_O: Ints) -> int:
    """The row, out of these, that may be read from and has most; -1 if none has anything."""
    found, tokens = -1, 0
    for row in rows_O:
        if readable_W[row] and cached_W[row] > tokens:
            found, tokens = row, cached_W[row]
    return found


@compiled(
    "int64[:, ::1](UniTuple(float64, 6), int64, int64, float64, float64, boolean, boolean, boolean, boolean, int64,"
    "int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, :, ::1],"
    "int64[::1], int64[:, ::1], int64, boolean[::1], int64[:, ::1], int64[:, ::1])"
)
def costs(
    cost: tuple[float, ...], prompt_tokens: int, smallest: int, beta: float, lam: float,
    by_work: bool, ordered: bool, calibrated: bool, own_time: bool, now_ns: int,
    line_CW: Ints, works_NW: Ints, sums_NW: Ints, chunks_2NW: Ints,
    cached_W: Ints, in_flight_OC: Ints, source_tokens: int, fetches_W: Bools, reads_2D: Ints, pending_OC: Ints,
) -> Ints:  # fmt: skip
    """The cheapest way at each worker, and of equals the first in their order. The formula is in `placement.py`; `smallest` is
    its C_min. `by_work`: the price is the queue alone. `own_time`: what others pay for a request is without the ratio.
    What is fetched are `source_tokens` tokens of another worker; `reads_2D` has, by how many of them are there already (in
    rising order), what the rest takes. Without `cached_W` only options count."""
    cost_CW = np.zeros((COST_COLUMNS, line_CW.shape[1]), np.int64)
    cost_CW[PRICE_US] = FOREVER

    def consider(kind: int, row: int, tokens: int, read_us: int, behind_us: int) -> None:
        degree = line_CW[DEGREE, row]
        ratio_ppm = line_CW[RATIO_PPM, row] if calibrated else PPM
        own_us = service_us(cost, degree, prompt_tokens, tokens, ratio_ppm) + read_us
        others_ppm = PPM if own_time else ratio_ppm
        taken_us = own_us
        if others_ppm != ratio_ppm:
            taken_us = service_us(cost, degree, prompt_tokens, tokens, others_ppm) + read_us
        smallest_us = taken_us
        if degree != smallest:
            smallest_us = service_us(cost, smallest, prompt_tokens, tokens, others_ppm) + read_us
        work_us = max(own_us, behind_us)
        queue_us, jobs = ahead(row, work_us, ordered, now_ns, line_CW, works_NW, sums_NW, chunks_2NW)
        occupancy_us = np.int64(np.rint(lam * (degree * taken_us - smallest * smallest_us)))
        weighed_us = (
            own_us + np.int64(np.rint((beta - 1.0) * taken_us)) if own_time else np.int64(np.rint(beta * own_us))
        )
        without_us = weighed_us + occupancy_us
        price_us = queue_us if by_work else queue_us + without_us + jobs * own_us
        if price_us < cost_CW[PRICE_US, row]:
            cost_CW[ROW, row], cost_CW[KIND, row], cost_CW[COUNTED_PPM, row] = row, kind, ratio_ppm
            cost_CW[CACHED_TOKENS, row], cost_CW[FETCH_US, row] = tokens, read_us
            cost_CW[QUEUE_US, row], cost_CW[DELAYED_JOBS, row], cost_CW[SERVICE_US, row] = queue_us, jobs, own_us
            cost_CW[OCCUPANCY_US, row] = 0 if by_work else occupancy_us
            cost_CW[OWN_US, row], cost_CW[PRICE_US, row] = without_us, price_us
            cost_CW[TIE_US, row] = own_us if by_work else queue_us

    for row in range(len(cached_W)):
        cost_CW[OWN_TOKENS, row] = cached_W[row]
        consider(OWN, row, cached_W[row], 0, 0)
    for row, tokens, read_us, behind_us in in_flight_OC:
        consider(IN_FLIGHT, row, tokens, read_us, behind_us)
    for row in range(len(cached_W) if source_tokens else 0):
        if fetches_W[row] and cached_W[row] < source_tokens:
            read_us = reads_2D[1, np.searchsorted(reads_2D[0], cached_W[row])]
            consider(FETCHED, row, source_tokens, read_us, 0)
    for row, tokens, read_us, behind_us in pending_OC:
        consider(PENDING, row, tokens, read_us, behind_us)
    return cost_CW


@compiled("Tuple((int64[:, ::1], int64))(int64[:, ::1], int64[::1], int64[::1], int64)")
def ranked(cost_CW: Ints, degree_W: Ints, rows_O: Ints, runners_up: int) -> tuple[Ints, int]:
    """What is told of, of these rows: the cheapest, the best of every other degree, the next so many. And the degree of the
    least price without queues. Of equals the first row counts, and the smallest degree."""
    told_T = np.empty(len(rows_O), np.int64)
    told, leaders, preferred = 0, -1, 0
    while told < len(rows_O) and (leaders < 0 or told < leaders + runners_up):
        best = -1
        for row in rows_O:
            if best >= 0:
                dearer_us = cost_CW[PRICE_US, row] - cost_CW[PRICE_US, best]
                if dearer_us > 0 or (dearer_us == 0 and cost_CW[TIE_US, row] >= cost_CW[TIE_US, best]):
                    continue
            is_told = False
            for place in range(told):
                other = told_T[place]
                if other == row or (leaders < 0 and degree_W[other] == degree_W[row]):
                    is_told = True
            if not is_told:
                best = row
        if best >= 0:
            told_T[told] = best
            told += 1
        else:
            leaders = told
    least_us = cost_CW[OWN_US, rows_O[0]]
    for row in rows_O:
        own_us, degree = cost_CW[OWN_US, row], degree_W[row]
        if preferred == 0 or own_us < least_us or (own_us == least_us and degree < preferred):
            least_us, preferred = own_us, degree
    told_TC = np.empty((told, COST_COLUMNS), np.int64)
    for place in range(told):
        told_TC[place] = cost_CW[:, told_T[place]]
    return told_TC, preferred
