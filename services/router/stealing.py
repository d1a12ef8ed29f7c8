"""Queued requests that should move to a worker with nothing to do. Pure.

A router asks for its own requests only: `release` at the old worker, then a decision like any other, which may find a still
better place. A move is worth it if by the prices of the policy the request is better off by more than the move itself takes,
so GPU time and lost prefixes are paid for. Whoever is waited for least gains least, so of each of the longest lines only the
last few are looked at. A request that has few attempts left stays where it is.
"""

from collections.abc import Collection, Iterable, Iterator
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from services.router.decider import State, look_out
from services.router.lines import Assignment, Load
from services.router.outlook import Outlook, bringing
from services.router.pricing import Weights, service_us
from shared.contracts.envelope import Stored
from shared.contracts.events import PrefillStarted, RequestAssigned
from shared.contracts.ids import RequestId, Source, WorkerId
from shared.model.blocks import reusable_tokens
from shared.model.calibration import PPM
from shared.model.parameters import Parameters
from shared.model.pool import Worker

LINES_MAX = 16
LAST_MAX = 4
"""Lines that are looked at, and requests of each: a decision per idle worker must stay as cheap as a placement."""

WAITING_MAX = 64
"""Of a line's end, in search of one's own: so an event, and an idle worker, costs the same however long lines are."""

MOVE_US = 20_000
"""A release, a record and another hand-shake, with room."""

ATTEMPTS_LEFT_MIN = 2
"""After that of the move itself: the idle worker may refuse it, and who takes the request then may die."""


class Time(NamedTuple):
    """What a request takes at a worker with its fetch, and what it would if the worker's ratio were 1."""

    service_us: int
    predicted_us: int


class Move(NamedTuple):
    """Attempt `attempt` of a request should leave its queue; `gain_us` is by how much it is better off."""

    request: RequestId
    attempt: int
    gain_us: int


def steals(parameters: Parameters) -> bool:
    """Under arrival order stealing does harm (ADR 0021), and so it is a part of one policy."""
    shortest_first = parameters.worker_order == "shortest-first"
    return (
        parameters.placement_policy == "vertumnus" and parameters.stealing and shortest_first and not parameters.frozen
    )


def idle_workers(state: State) -> list[Worker]:
    """Those that may be given work and have none."""
    loads = state.loads.of_worker
    return [each for each in state.pool.workers.values() if each.id not in loads and state.pool.schedulable(each)]


def is_crowded(state: State, source: Source, stored: Stored) -> bool:
    """Whether an event that was just folded tells of another router's work at a worker where a request of `source` waits: that
    was placed without knowing of it, and may be better off elsewhere."""
    data = stored.data
    if not steals(state.parameters):
        return False
    if (
        not isinstance(data, (RequestAssigned, PrefillStarted))
        or (load := state.loads.of_worker.get(data.worker)) is None
    ):
        return False
    other = state.loads.open.get(data.request)
    if other is None or other.source == source:
        return False
    return any(state.loads.open[request].source == source for request in islice(reversed(load.line), WAITING_MAX))


def of_each_degree(workers: Iterable[Worker]) -> list[Worker]:
    """The first of each: enough to know whether somebody is better off at one of them, for the placement looks at all."""
    return list({worker.degree: worker for worker in reversed(list(workers))}.values())


def best_move(state: State, source: Source, idle: Worker, now_ns: int, staying: Collection[RequestId]) -> Move | None:
    """The request of router `source` that gains most by going to `idle`; None if nobody gains. Those in `staying` do not go."""
    if not steals(state.parameters):
        return None
    if idle.id in state.loads.of_worker or not state.pool.schedulable(idle):
        return None
    state.board.look(state.pool, state.loads, state.calibration, now_ns)
    outlook = look_out(state, now_ns)
    moves = (
        Move(request, state.loads.open[request].attempt, gain_us)
        for load in nlargest(LINES_MAX, state.loads.of_worker.values(), key=lambda load: load.line.total_us)
        for request in islice(_own(state, source, load, staying), LAST_MAX)
        if (gain_us := _gain_us(state, outlook, request, load, idle, now_ns)) > 0
    )
    return max(moves, key=lambda move: (move.gain_us, move.request), default=None)


def _own(state: State, source: Source, load: Load, staying: Collection[RequestId]) -> Iterator[RequestId]:
    """This router's requests at the end of a line, the last first."""
    attempt_max = state.parameters.attempts_max - 1 - ATTEMPTS_LEFT_MIN
    for request in islice(reversed(load.line), WAITING_MAX):
        opened = state.loads.open[request]
        movable = not opened.placed_only and request not in staying
        if movable and opened.source == source and opened.attempt <= attempt_max:
            yield request


def _gain_us(state: State, outlook: Outlook, request: RequestId, load: Load, idle: Worker, now_ns: int) -> int:
    """What it costs where it is, with whom it delays there, less what it would cost at the idle worker."""
    opened = state.loads.open[request]
    here, old = opened.assignment, state.pool.workers.get(opened.worker or WorkerId(""))
    assert here is not None, "who waits in a line has a reservation"
    avoided = idle.id in opened.refused_by or idle.node in opened.silent
    there = None if avoided else _there(state, outlook, request, idle)
    if there is None or old is None:
        return 0
    ahead = load.ahead(here.service_us, now_ns)
    wait_us = ahead.queue_us - here.service_us + ahead.jobs * here.service_us  # it is one of those ahead itself
    by = outlook.weights
    return wait_us + _own_us(by, _here(state, here, old), old.degree) - _own_us(by, there, idle.degree) - MOVE_US


def _here(state: State, here: Assignment, worker: Worker) -> Time:
    """As reserved. What the prefill itself does not explain was for a fetch, if there is one."""
    prefill = _time(state, worker, here.prompt_tokens, here.prompt_tokens - here.uncached_tokens)
    fetch_us = max(0, here.service_us - prefill.service_us) if here.fetch_from is not None else 0
    return Time(here.service_us, prefill.predicted_us + fetch_us)


def _there(state: State, outlook: Outlook, request: RequestId, idle: Worker) -> Time | None:
    """At the idle worker, to which nothing is on its way but what is pending there; None if it may not have the request."""
    here, chain = state.loads.open[request].assignment, state.holders.chains.get(request, ())
    if here is None or not outlook.board.members.takes(idle.id, here.prompt_tokens):
        return None
    blocks = state.holders.matched(chain).get(idle.id, 0)
    cached_tokens = reusable_tokens(blocks, outlook.spec.block_tokens, here.prompt_tokens)
    own = _time(state, idle, here.prompt_tokens, cached_tokens)
    brought = bringing(outlook, chain, here.prompt_tokens, idle.id, cached_tokens)
    return own if brought is None else min(own, _time(state, idle, here.prompt_tokens, *brought))


def _time(state: State, worker: Worker, prompt_tokens: int, cached_tokens: int, fetch_us: int = 0) -> Time:
    ratio_ppm = state.calibration.ratio_ppm(worker.id) if state.parameters.calibration else PPM
    of = (state.coefficients, worker.degree, prompt_tokens, cached_tokens)
    return Time(fetch_us + service_us(*of, ratio_ppm), fetch_us + service_us(*of, PPM))


def _own_us(by: Weights, time: Time, degree: int) -> int:
    """β·s + λ·C·s, with the ratio in s or in the request's own time alone: what else belongs to a price is the same on both
    sides."""
    if by.ratio_in_own_time:
        return time.service_us + round((by.beta - 1) * time.predicted_us) + round(by.lam * degree * time.predicted_us)
    return round(by.beta * time.service_us) + round(by.lam * degree * time.service_us)
