"""The rules by name, as `vertumnus simulate` and the benches take them."""

from collections.abc import Callable
from random import Random

from simulation.baselines.dynamo import KvCost
from simulation.baselines.llmd import LengthBuckets, PreciseScorers
from simulation.baselines.preble import PrebleE2
from simulation.baselines.rule import Rule
from simulation.baselines.sglang import CacheAware
from simulation.baselines.simple import CentralQueue, LeastTokens, PowerOfTwo, RoundRobin

RULES: dict[str, Callable[[Random], Rule]] = {
    RoundRobin.name: lambda _: RoundRobin(),
    LeastTokens.name: lambda _: LeastTokens(),
    PowerOfTwo.name: PowerOfTwo,
    CentralQueue.name: lambda _: CentralQueue(),
    LengthBuckets.name: LengthBuckets,
    CacheAware.name: lambda _: CacheAware(),
    KvCost.name: KvCost,
    PreciseScorers.name: PreciseScorers,
    PrebleE2.name: lambda _: PrebleE2(),
}
"""Made with the chance that some of them use."""
