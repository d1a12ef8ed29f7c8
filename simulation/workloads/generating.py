"""Traces out of thin air, seeded: sessions with shared system prompts and growing prefixes.

Arrivals are a Poisson process of exactly the asked rate, or of one that wavers around it (`Phase.burstiness`). Each arrival is
the next turn of the session that has waited longest since its think time ended or, when none is waiting, the first turn of a
new one. A turn's prompt is the whole
session so far (system prompt, messages, answers) and a new message. The first `think_s` seconds hold few second turns, so
the hit rate takes that long to rise.

`SHAPES` are fitted to published traces; `test_workload_generating.py` holds them to the figures stated here. The fit is
of lengths and sharing; how bursty a trace is belongs to its phase in `catalogue.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count
from math import ceil, exp, inf, log
from random import Random
from typing import NamedTuple

from simulation.workloads.rows import BLOCK_TOKENS, Row
from simulation.workloads.statistics import COUNT_S


class Spread(NamedTuple):
    """A log-normal number of tokens, and a number that is always there."""

    median: float
    sigma: float
    least: int = 0

    def draw(self, chance: Random) -> int:
        """At least 1."""
        return max(1, self.least + round(exp(chance.gauss(log(self.median), self.sigma))))


class Shape(NamedTuple):
    """What sessions are like."""

    system_prompts: int
    """Kinds of application; kind k is 1/k^1.1 as popular as the first."""
    system_tokens: Spread
    first_message: Spread
    next_message: Spread
    output: Spread
    turns: float
    """Mean per session, geometric."""
    think_s: float
    """Mean between an answer and the next turn, exponential."""
    prompt_tokens_max: int = 128 * 1024
    """A session that would grow beyond this ends."""


SHAPES = {
    "conversation": Shape(
        system_prompts=1,
        system_tokens=Spread(512, 0),
        first_message=Spread(4_400, 1.2),
        next_message=Spread(1_600, 1.4),
        output=Spread(290, 0.6),
        turns=1.62,
        think_s=60,
    ),
    "tool-agent": Shape(
        system_prompts=40,
        system_tokens=Spread(2_300, 0.3),
        first_message=Spread(2_300, 1.2),
        next_message=Spread(600, 1.2),
        output=Spread(110, 1.0),
        turns=1.8,
        think_s=15,
    ),
}
"""`conversation` follows Mooncake's conversation trace: prompts of mean 12.0K, P50 6.9K, P90 27K, P99 85K tokens, outputs
of 343; 6.9 % of the requests are longer than 32K; an endless cache would have 37 % of the tokens.
`tool-agent` follows what is published of Mooncake's tool-agent trace: mean 8.6K in, 182 out, 59 % of the tokens reusable."""


class Phase(NamedTuple):
    """A stretch of steady traffic."""

    seconds: float
    requests_per_s: float
    shape: Shape
    burstiness: float = 1.0
    """Variance over mean of the arrivals in `COUNT_S` seconds, as `statistics.py` measures it; 1 for a Poisson process."""


RATE_S = 30.0
"""A wavering rate is drawn anew so often: in Mooncake's conversation trace the counts of ten seconds go with those of the next
ten or twenty (correlations of .29 and .20), and not with those a minute later."""


Rate = Callable[[float], float]
"""Requests per second at a second."""


def generated(phases: Sequence[Phase], chance: Random) -> Iterator[Row]:
    """The rows of the phases one after the other; sessions begin and end with their phase.

    Memory: the sessions that wait for their next turn, about rate × think time.
    Errors: ValueError on a phase without rate, or evener than chance.
    """
    start_ms = 0.0
    ids = count()
    systems = {phase.shape: _systems(phase.shape, ids, chance) for phase in phases}
    for phase in phases:
        if not (0 < phase.requests_per_s < inf and 0 < phase.seconds < inf):
            raise ValueError(
                f"phase: {phase.requests_per_s} requests/s for {phase.seconds} s; both must be above 0, and end"
            )
        if phase.burstiness < 1:
            raise ValueError(f"burstiness: {phase.burstiness} is below 1, that of a Poisson process")
        arrivals = wavering_s(phase, chance)
        for row in _turns(phase.shape, arrivals, systems[phase.shape], ids, chance):
            yield row._replace(arrival_ms=start_ms + row.arrival_ms)
        start_ms += phase.seconds * 1000


def sessions(shape: Shape, arrivals: Iterator[float], ids: "count[int]", chance: Random) -> Iterator[Row]:
    """The rows of one shape that arrive at the given seconds, in order. `ids` gives them their blocks."""
    return _turns(shape, arrivals, _systems(shape, ids, chance), ids, chance)


def steady_s(requests_per_s: float, seconds: float, chance: Random) -> Iterator[float]:
    """A Poisson process of one rate."""
    return arrivals_s(lambda _: requests_per_s, requests_per_s, seconds, chance)


def wavering_s(phase: Phase, chance: Random) -> Iterator[float]:
    """A Poisson process whose rate is constant, or is drawn every `RATE_S` seconds from the gamma distribution of this mean
    that gives the phase its burstiness: a count in t seconds of a rate of mean m and variance v has mean m·t and variance
    m·t + v·t²."""
    mean = phase.requests_per_s
    if phase.burstiness == 1:
        yield from steady_s(mean, phase.seconds, chance)
        return
    variance = (phase.burstiness - 1) * mean / COUNT_S
    for stretch in range(ceil(phase.seconds / RATE_S)):
        begin_s = stretch * RATE_S
        rate = chance.gammavariate(mean**2 / variance, variance / mean)
        for at_s in steady_s(rate, min(RATE_S, phase.seconds - begin_s), chance):
            yield begin_s + at_s


def arrivals_s(rate: Rate, most: float, seconds: float, chance: Random) -> Iterator[float]:
    """A Poisson process whose rate never exceeds `most`: arrivals at that rate, of which some are left out (Lewis and Shedler,
    Simulation of nonhomogeneous Poisson processes by thinning, 1979)."""
    now_s = 0.0
    while (now_s := now_s + chance.expovariate(most)) < seconds:
        now_rate = rate(now_s)
        assert now_rate <= most, f"{now_rate} requests/s at {now_s} s; {most} were promised at most"
        if now_rate == most or chance.random() * most < now_rate:
            yield now_s


def _turns(
    shape: Shape, arrivals: Iterator[float], systems: "_Systems", ids: "count[int]", chance: Random
) -> Iterator[Row]:
    waiting: list[tuple[float, int, Session]] = []
    for number, now_s in enumerate(arrivals):
        if waiting and waiting[0][0] <= now_s:
            session = heappop(waiting)[2]
            session.tokens += shape.next_message.draw(chance)
        else:
            session = systems.open(shape.first_message.draw(chance), chance)
        session.tokens = min(session.tokens, shape.prompt_tokens_max)
        row = Row(now_s * 1000, session.tokens, shape.output.draw(chance), session.prompt(ids))
        yield row
        session.tokens += row.output_tokens
        if chance.random() < 1 - 1 / shape.turns and session.tokens < shape.prompt_tokens_max:
            heappush(waiting, (now_s + chance.expovariate(1 / shape.think_s), number, session))


@dataclass
class Session:
    """A conversation so far: its length, and the ids of the blocks that are whole for good."""

    tokens: int
    whole: list[int] = field(default_factory=list)

    def prompt(self, ids: "count[int]") -> tuple[int, ...]:
        """The ids of a prompt of `tokens`; its last, partial block is not the block it will become."""
        blocks, rest = divmod(self.tokens, BLOCK_TOKENS)
        self.whole.extend(next(ids) for _ in range(blocks - len(self.whole)))
        return (*self.whole, next(ids)) if rest else tuple(self.whole)


class _Systems(NamedTuple):
    """The system prompts of a shape."""

    tokens: list[int]
    blocks: list[list[int]]
    popularity: list[float]

    def open(self, message_tokens: int, chance: Random) -> Session:
        [k] = chance.choices(range(len(self.tokens)), cum_weights=self.popularity)
        return Session(self.tokens[k] + message_tokens, list(self.blocks[k]))


def _systems(shape: Shape, ids: "count[int]", chance: Random) -> _Systems:
    tokens = [shape.system_tokens.draw(chance) for _ in range(shape.system_prompts)]
    blocks = [[next(ids) for _ in range(length // BLOCK_TOKENS)] for length in tokens]
    return _Systems(tokens, blocks, list(accumulate(k**-1.1 for k in range(1, shape.system_prompts + 1))))
