"""A node of the trie, its statistics, and what the parameters make of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from shared.contracts.ids import BlockId
from shared.model.lattice import DEGREES
from shared.model.parameters import Parameters

COLD = 1e-6
"""A statistic below this is 0: under any allowed threshold by a factor of 1,000."""

INDEX = {degree: index for index, degree in enumerate(DEGREES)}


@dataclass(slots=True, eq=False)
class Node:
    """One block. Lists are by degree (`INDEX`); `access`, `missed` and `seen` are as of scan `stamp`, None if there never was
    any. `held_below` counts the children that somebody holds."""

    block: BlockId
    parent: "Node | None"
    depth: int
    children: int = 0
    held_below: int = 0
    replicas: list[int] = field(default_factory=lambda: [0] * len(DEGREES))
    access: list[float] | None = None
    missed: list[float] | None = None
    seen: float = 0.0
    stamp: int = 0

    def upwards(self) -> Iterator["Node"]:
        """The node, its parent, … the root."""
        above: Node | None = self
        while above is not None:
            yield above
            above = above.parent


class Limits(NamedTuple):
    """What the parameters mean for the trie: the decay of a scan, and what makes a candidate."""

    decay: float
    inter: float
    intra: float
    reclaim: float


def limits_of(parameters: Parameters) -> Limits:
    """Under `regret` a statistic fades within `regret_fade_s` whatever the time between two scans is, and is worth a copy when
    what it would come to over `regret_horizon_s` exceeds the price of one."""
    if parameters.cache_policy != "regret":
        return Limits(parameters.decay, parameters.theta_inter, parameters.theta_intra, parameters.theta_reclaim)
    decay = max(0.01, 1 - parameters.scan_every_s / parameters.regret_fade_s)
    inter = parameters.copy_price_s * parameters.regret_fade_s / parameters.regret_horizon_s
    return Limits(decay, inter, parameters.theta_intra, parameters.theta_reclaim)


class Demand(NamedTuple):
    """Both statistics of a node now, by `INDEX`."""

    access: tuple[float, ...]
    missed: tuple[float, ...]


class Candidate(NamedTuple):
    """A (z, C) of one of Algorithm 2's lists, with its replicas and its statistic."""

    node: Node
    degree: int
    replicas: int
    score: float


class Candidates(NamedTuple):
    """Algorithm 2's lists. Reclaimable pairs are counted only: a cold trie is all of them."""

    inter: list[Candidate]
    intra: list[Candidate]
    reclaimable: int


NONE = (0.0,) * len(DEGREES)


def decayed(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(value * factor if value * factor >= COLD else 0.0 for value in values)


@lru_cache(maxsize=4_096)
def power(decay: float, scans: int) -> float:
    """decay ^ scans by multiplications alone: `pow` may differ in the last bit from one machine to another."""
    result, square = 1.0, decay
    while scans:
        if scans & 1:
            result *= square
        square *= square
        scans >>= 1
    return result
