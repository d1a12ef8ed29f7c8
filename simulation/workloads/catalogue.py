"""The made-up workloads by name, with their published rates and lengths."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from simulation.workloads.drifting import drifting
from simulation.workloads.generating import SHAPES, Phase, generated
from simulation.workloads.mixtures import day, phased
from simulation.workloads.rows import Row

CONVERSATION = Phase(3_537, 12_031 / 3_537, SHAPES["conversation"], burstiness=1.5)
"""Mooncake's conversation trace: 12,031 requests in 3,537 s. As published its burstiness is 2.1, because its arrivals are
rounded to 3 s and a count of ten seconds has three or four of those; with the rounding undone it is 1.5."""

TOOL_AGENT = Phase(3_600, 23_608 / 3_600, SHAPES["tool-agent"])
"""Mooncake's tool-agent trace: 23,608 requests in an hour. Nothing is published of how bursty they were."""

WORKLOADS: dict[str, Callable[[Random], Iterator[Row]]] = {
    "conversation": partial(generated, [CONVERSATION]),
    "tool-agent": partial(generated, [TOOL_AGENT]),
    "drifting": drifting,
    "phased": phased,
    "day": day,
}
"""Each from its seed, in order of arrival. Another rate is `shaping.at_speed`'s to give."""
