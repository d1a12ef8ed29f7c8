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


Replicas = tuple[int, ...]
"""How many workers of each degree have a block, by `INDEX`."""

NOWHERE: Replicas = (0,) * len(DEGREES)


@lru_cache(maxsize=4_096)
def with_more(replicas: Replicas, index: int, more: int) -> Replicas:
    """A replica more or less at one degree. Cached, so that the few counts that there are exist once and not in every node."""
    return (*replicas[:index], replicas[index] + more, *replicas[index + 1 :])


@dataclass(slots=True)
class Statistics:
    """What a node was asked for, by `INDEX`, as of scan `stamp`."""

    stamp: int
    access: list[float] = field(default_factory=lambda: [0.0] * len(DEGREES))
    missed: list[float] = field(default_factory=lambda: [0.0] * len(DEGREES))
    seen: float = 0.0

    def settle(self, factor: float, scan: int) -> None:
        """Make it as of `scan`."""
        self.seen = decayed((self.seen,), factor)[0]
        self.access, self.missed = list(decayed(self.access, factor)), list(decayed(self.missed, factor))
        self.stamp = scan

    def is_hot(self, factor: float, limits: "Limits") -> bool:
        """Whether a node may be a candidate for a copy, or is demanded enough to be kept."""
        return max(self.access) * factor >= limits.reclaim or max(self.missed) * factor > limits.inter


@dataclass(slots=True, eq=False)
class Node:
    """One block; there are millions, so what most of them do not need is elsewhere. `ends` counts, as
    `replicas` do, the workers that hold it and nothing below it; `born` is the scan of its planting; `statistics` are None
    until something is asked for."""

    block: BlockId
    parent: "Node | None"
    depth: int
    born: int
    children: int = 0
    replicas: Replicas = NOWHERE
    ends: Replicas = NOWHERE
    statistics: Statistics | None = None

    @property
    def stamp(self) -> int:
        """The scan at which it was last asked for, or else planted."""
        return self.born if self.statistics is None else self.statistics.stamp

    @property
    def path(self) -> list[BlockId]:
        """The blocks from the root to this one."""
        return [each.block for each in self.upwards()][::-1]

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
NO_DEMAND = Demand(NONE, NONE)


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


class Factors(dict[int, float]):
    """What a statistic as of each scan has faded to at `scan`: most of many nodes were asked for at the same few."""

    def __init__(self, decay: float, scan: int) -> None:
        self._decay, self._scan = decay, scan

    def __missing__(self, stamp: int) -> float:
        found = self[stamp] = power(self._decay, self._scan - stamp)
        return found
