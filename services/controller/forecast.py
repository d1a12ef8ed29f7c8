"""The forecasting policy, "robust what-if": replay what has just arrived on every composition within reach. Pure.

After a window, the longest recent stretch (15 to 120 s) that looks stationary is taken: going back by 15 s at a time, until
the rate or the share of prompts above 16K differs by more than four standard deviations from what is taken already. Its
arrivals are replayed at .95, 1.05 and 1.15 times their rate (`replaying.py`); a composition's score is the mean over the three
of its mean TTFT relative to the best one's, at most 3. A composition is worth moving to if it gains 3 % (`forecast_gain`) and
if that is no chance: by what the parts of the stretch say for themselves, the gain is its standard error right after a change
of load, and three times that where two minutes look alike. Of those the best score wins, with 1 % charged for each node that
has to move. At most two nodes move at once, those first whose drain is predicted to end first; the rest is decided again
after the next window. What undoes a change of the last 180 s, on whichever node, needs twice the gain, and nothing is undone
within two windows.

Real caches make queues less even than replayed ones, so a little more load is replayed than came; with much more, every burst
speaks for small workers (ADR 0039). Asking for evidence is what makes it stay: a few long prompts in a stretch decide how
mixed pools compare in it (ADR 0029).
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from math import sqrt
from typing import NamedTuple, assert_never

from services.controller.arrivals import HISTORY_NS, Arrival, Change
from services.controller.steps import NodeSight, holds_tokens
from shared.contracts.ids import NodeId
from shared.model.cost import Coefficients
from shared.model.lattice import Composition
from shared.model.parameters import Parameters

NAME = "forecast"

STRIDE_NS = 15 * 10**9
"""What is taken at least, and by how much more at a time: of a change that is as old as that, nothing from before it counts."""

HEARD_NS = 30 * 10**9
"""For how long arrivals must have come at all: the first ones of a pool find nothing cached."""

LONG_TOKENS = 16_384
Z_MAX = 4.0
"""Of real changes of load, which are larger after 15 s; arrivals that come in sessions vary more than Poisson's."""

ARRIVALS_MIN, ARRIVALS_MAX = 20, 1_000
POOLS_MAX = 64
SMALL_POOL = 2
"""A pool of so few nodes may mix degrees within a node; in a larger one each node is of one degree, or as it is."""

MOVE_CHARGE = 0.01
NODES_AT_ONCE = 2
Z_MIN, Z_MIN_SETTLED = 1.0, 3.0
"""Of a gain right after a change of load, when most pools are the wrong ones; and after two minutes that all look alike, of
which this is the sixth look. In between in proportion to the stretch."""

UNDONE_NS = 180 * 10**9
KEPT_WINDOWS = 2
PPM = 1_000_000

Degrees = tuple[int, ...]
"""Of all workers of a pool, in falling order: what a replay needs to know of it."""


class Replayed(NamedTuple):
    """One arrival of the question: microseconds since the first, R and P."""

    time_us: int
    uncached_tokens: int
    cached_tokens: int


class Rule(NamedTuple):
    """How prompts are placed and served. `adaptive`: β follows the load. `ordered`: only work ahead is waited for, and whom a
    prompt delays is charged."""

    beta: float
    lam: float
    shortest_first: bool
    adaptive: bool = False
    ordered: bool = False


class Question(NamedTuple):
    """Which pools, which arrivals, and the live rule."""

    arrivals: tuple[Replayed, ...]
    pools: tuple[Degrees, ...]
    coefficients: Coefficients
    rule: Rule


class Scores(NamedTuple):
    """An answer, in millionths for each pool: how it fares relative to the best, and the standard error of its difference from
    the pool as it is. Without errors a forecast is believed to the last digit."""

    ppm: tuple[int, ...]
    errors_ppm: tuple[int, ...] | None


class Target(NamedTuple):
    """A pool within reach: each node's composition, and how many nodes have to move."""

    compositions: tuple[Composition, ...]
    moves: int

    @property
    def degrees(self) -> Degrees:
        return tuple(sorted((degree for each in self.compositions for degree in each), reverse=True))


class Choice(NamedTuple):
    """Where to go, and which nodes go now. `gain` is what the scores promise for the whole way."""

    target: Target
    gain: float
    moves: tuple[tuple[NodeId, Composition], ...]


def stationary(arrivals: Sequence[Arrival], now_ns: int) -> list[Arrival]:
    """The arrivals of the longest recent stretch that looks stationary."""
    oldest_ns = now_ns - HISTORY_NS
    begin_ns = now_ns - STRIDE_NS
    taken = [each for each in arrivals if each.time_ns > begin_ns]
    while begin_ns - STRIDE_NS >= oldest_ns:
        older = [each for each in arrivals if begin_ns - STRIDE_NS < each.time_ns <= begin_ns]
        if not older or _differs(taken, now_ns - begin_ns, older):
            break
        begin_ns -= STRIDE_NS
        taken = older + taken
    return taken


def _differs(taken: Sequence[Arrival], taken_ns: int, older: Sequence[Arrival]) -> bool:
    """Whether two stretches have another rate (Poisson) or another share of long prompts (binomial)."""
    n0, n1 = len(taken), len(older)
    long0, long1 = (sum(each.prompt_tokens > LONG_TOKENS for each in part) for part in (taken, older))
    seconds0, seconds1 = taken_ns / 1e9, STRIDE_NS / 1e9
    rate_error = sqrt(n0 / seconds0**2 + n1 / seconds1**2)
    if rate_error and abs(n0 / seconds0 - n1 / seconds1) > Z_MAX * rate_error:
        return True
    if not n0 or not n1:
        return False  # a stretch without prompts has no share
    share = (long0 + long1) / (n0 + n1)
    share_error = sqrt(share * (1 - share) * (1 / n0 + 1 / n1))
    return bool(share_error) and abs(long0 / n0 - long1 / n1) > Z_MAX * share_error


def sampled(arrivals: Sequence[Arrival]) -> tuple[Replayed, ...]:
    """At most 1,000 of them, chosen by hash, in order; time is compressed as much as they were thinned, so the rate stays."""
    kept = sorted(arrivals, key=lambda each: blake2b(each.request.encode(), digest_size=8).digest())[:ARRIVALS_MAX]
    kept.sort(key=lambda each: (each.time_ns, each.request))
    if not kept:
        return ()
    first_ns = kept[0].time_ns
    return tuple(
        Replayed(
            (each.time_ns - first_ns) * len(kept) // (1_000 * len(arrivals)), each.uncached_tokens, each.cached_tokens
        )
        for each in kept
    )


def targets(nodes: Sequence[NodeSight]) -> list[Target]:
    """The pool as it is and every other one within reach, fewest moves first, one of each kind, at most 64. None of them takes
    shorter prompts than the pool takes now."""
    held = holds_tokens(nodes)
    begun = Target(tuple(each.composition for each in nodes), 0)
    found, edge = {begun.degrees: begun}, [begun]
    for moves in count(1):
        further = []
        for target in edge:
            for compositions in _changed(nodes, target.compositions):
                reached = Target(compositions, moves)
                holds = max(each.holds_tokens(to) for each, to in zip(nodes, compositions, strict=True))
                if reached.degrees not in found and holds >= held:
                    found[reached.degrees] = reached
                    further.append(reached)
                if len(found) >= POOLS_MAX:
                    return list(found.values())
        edge = further
        if not edge:
            return list(found.values())
    raise AssertionError("the search ends where nothing is left to change")


def _changed(nodes: Sequence[NodeSight], compositions: tuple[Composition, ...]) -> Iterator[tuple[Composition, ...]]:
    """Pools in which one node more has left its composition."""
    seen = set()
    for index, (node, now) in enumerate(zip(nodes, compositions, strict=True)):
        if not node.movable or now != node.composition or (node.composition, node.degrees) in seen:
            continue
        seen.add((node.composition, node.degrees))
        for shape in shapes(node, mixed=len(nodes) <= SMALL_POOL):
            yield (*compositions[:index], shape, *compositions[index + 1 :])


def shapes(node: NodeSight, *, mixed: bool) -> list[Composition]:
    """The compositions that a node may go to: all of one degree, or any mix, larger workers first."""
    ranks = sum(node.composition)
    degrees = sorted(node.degrees, reverse=True)
    found = (
        list(_partitions(ranks, degrees))
        if mixed
        else [(each,) * (ranks // each) for each in degrees if not ranks % each]
    )
    return [each for each in found if sorted(each) != sorted(node.composition)]


def _partitions(ranks: int, degrees: Sequence[int]) -> Iterator[Composition]:
    if not ranks:
        yield ()
    for index, degree in enumerate(degrees):
        if degree <= ranks:
            yield from ((degree, *rest) for rest in _partitions(ranks - degree, degrees[index:]))


def rule(parameters: Parameters) -> Rule:
    """That of the placement policy in force."""
    shortest_first = parameters.worker_order == "shortest-first"
    match parameters.placement_policy:
        case "paper":
            return Rule(parameters.beta, parameters.lam, shortest_first)
        case "vertumnus":
            ordered = parameters.ordered_queue and shortest_first
            return Rule(
                parameters.beta,
                parameters.lam_vertumnus,
                shortest_first,
                adaptive=parameters.adaptive_beta,
                ordered=ordered,
            )
        case "least-work":
            return Rule(0.0, 0.0, shortest_first)
        case _:
            assert_never(parameters.placement_policy)


def choose(
    nodes: Sequence[NodeSight],
    found: Sequence[Target],
    scores: Scores,
    stretch_us: int,
    parameters: Parameters,
    changes: Mapping[Change, int],
    now_ns: int,
) -> Choice | None:
    """The move that the scores call for; `found[0]` is the pool as it is. None if staying is as good. `changes` says when a
    node last went from one composition to another."""
    errors_ppm = scores.errors_ppm or (0,) * len(found)
    needed_ppm = scores.ppm[0] * parameters.forecast_gain
    z_min = max(Z_MIN, Z_MIN_SETTLED * stretch_us * 1_000 / HISTORY_NS)
    promising = [
        index
        for index, (score_ppm, error_ppm) in enumerate(zip(scores.ppm, errors_ppm, strict=True))
        if index and scores.ppm[0] - score_ppm >= max(needed_ppm, z_min * error_ppm)
    ]
    if not promising:
        return None
    best = min(promising, key=lambda index: (scores.ppm[index] * (1 + MOVE_CHARGE * found[index].moves), index))
    gained = 1 - scores.ppm[best] / scores.ppm[0]
    by_name = {each.node: each.composition for each in nodes}
    moves = tuple((node, to) for _, node, to in sorted(_ways(nodes, found[best]))[:NODES_AT_ONCE])
    undone_ns = [now_ns - changes[back] for node, to in moves if (back := Change.of(to, by_name[node])) in changes]
    latest_ns = min(undone_ns, default=UNDONE_NS)
    if latest_ns < KEPT_WINDOWS * parameters.window_s * 10**9:
        return None
    if latest_ns < UNDONE_NS and gained < 2 * parameters.forecast_gain:
        return None
    return Choice(found[best], gained, moves)


def _ways(nodes: Sequence[NodeSight], target: Target) -> list[tuple[int, NodeId, Composition]]:
    """(drain, node, composition) of each node that has to move. Of equal nodes those go that are free first."""
    free: dict[tuple[Composition, Degrees], list[tuple[int, NodeId]]] = {}
    for node in nodes:
        if node.movable:
            drain_us = max((each.drain_us for each in node.workers), default=0)
            free.setdefault((node.composition, node.degrees), []).append((drain_us, node.node))
    for equals in free.values():
        equals.sort(reverse=True)
    return [
        (*free[node.composition, node.degrees].pop(), to)
        for node, to in zip(nodes, target.compositions, strict=True)
        if node.composition != to
    ]
