"""Loads that change while they run, seeded: phases, and a day. Short prompts and long ones come independently of each other.

The short ones are sessions of the shapes of `generating.py` that end before they are long. Sessions outlast a change of rate.
"""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import accumulate, count
from math import cos, pi
from random import Random
from typing import NamedTuple

from simulation.workloads.generating import SHAPES, Rate, Shape, Spread, arrivals_s, sessions
from simulation.workloads.rows import Row
from simulation.workloads.statistics import LONG_TOKENS

SHORT_TOOL_AGENT = SHAPES["tool-agent"]._replace(prompt_tokens_max=LONG_TOKENS)
SHORT_CONVERSATION = SHAPES["conversation"]._replace(prompt_tokens_max=LONG_TOKENS)
LONG = Shape(
    system_prompts=1,
    system_tokens=Spread(512, 0),
    first_message=Spread(12_000, 0.9, least=LONG_TOKENS),
    next_message=Spread(1_600, 1.4),
    output=Spread(290, 0.6),
    turns=1.7,
    think_s=60,
)
"""Every prompt is longer than 32K, half of them than 45K; two of five go on with an earlier one."""


class Stretch(NamedTuple):
    """A stretch of a phased load."""

    seconds: float
    requests_per_s: float
    long_share: float


PHASES = (
    Stretch(480, 15, 0.03),
    Stretch(480, 27.5, 0.004),
    Stretch(480, 15, 0.03),
    Stretch(480, 2.4, 0.30),
    Stretch(180, 15, 0.03),
)
"""Moderate, many short ones, moderate, few but long ones, moderate: no one composition is best in all of them."""

PHASED_SHORT = SHAPES["tool-agent"]._replace(prompt_tokens_max=8 * 1024)
"""So short that the paper's rule on ten workers of degree 4 has mean TTFTs of 0.35, 0.25 and 1.40 s in the first, second and
fourth phase, where the study that the phases are from has 0.39, 0.25 and 1.63 s."""

DAY_S = 86_400
DAY_TROUGH, DAY_PEAK = 3.0, 9.0
"""Requests per second at the beginning and end, and in the middle, of the day."""

DAY_LONG_TROUGH, DAY_LONG_PEAK = 0.08, 0.04
"""The long share at the same times: what runs by night is longer."""

DAY_TOOLS_LEAST, DAY_TOOLS_MOST = 0.15, 0.95
"""How many of the short requests come from tools, least a quarter into the day and most three quarters into it."""


def phased(chance: Random, stretches: Sequence[Stretch] = PHASES) -> Iterator[Row]:
    """The stretches one after the other; short prompts are of tools, and of 8K tokens at most."""
    ends_s = list(accumulate(each.seconds for each in stretches))

    def now(at_s: float) -> Stretch:
        return next(stretch for stretch, end_s in zip(stretches, ends_s, strict=True) if at_s < end_s)

    def short(at_s: float) -> float:
        return now(at_s).requests_per_s * (1 - now(at_s).long_share)

    def long(at_s: float) -> float:
        return now(at_s).requests_per_s * now(at_s).long_share

    most = max(each.requests_per_s for each in stretches)
    return _mixed([(PHASED_SHORT, short), (LONG, long)], most, ends_s[-1], chance)


def day(chance: Random, seconds: float = DAY_S) -> Iterator[Row]:
    """A day, or one pressed into `seconds` at the same rates."""

    def wave(at_s: float) -> float:
        """0 at both ends, 1 in the middle."""
        return (1 - cos(2 * pi * at_s / seconds)) / 2

    def between(trough: float, peak: float, share: float) -> float:
        return trough + (peak - trough) * share

    def short(at_s: float) -> float:
        rate = between(DAY_TROUGH, DAY_PEAK, wave(at_s))
        return rate * (1 - between(DAY_LONG_TROUGH, DAY_LONG_PEAK, wave(at_s)))

    def tools(at_s: float) -> float:
        return between(DAY_TOOLS_LEAST, DAY_TOOLS_MOST, wave((at_s + seconds * 3 / 4) % seconds))

    streams = [
        (SHORT_TOOL_AGENT, lambda at_s: short(at_s) * tools(at_s)),
        (SHORT_CONVERSATION, lambda at_s: short(at_s) * (1 - tools(at_s))),
        (LONG, lambda at_s: between(DAY_TROUGH, DAY_PEAK, wave(at_s)) - short(at_s)),
    ]
    return _mixed(streams, DAY_PEAK, seconds, chance)


def _mixed(streams: Sequence[tuple[Shape, Rate]], most: float, seconds: float, chance: Random) -> Iterator[Row]:
    """Each stream has chances of its own, so that what one draws moves nothing in another."""
    ids = count()
    chances = [Random(chance.getrandbits(64)) for _ in streams]
    return merge(
        *(
            sessions(shape, arrivals_s(rate, most, seconds, own), ids, own)
            for (shape, rate), own in zip(streams, chances, strict=True)
        ),
        key=lambda row: row.arrival_ms,
    )
