"""The rules by name, as `vertumnus simulate` and the benches take them."""

from collections.abc import Callable
from random import Random

from simulation.baselines.rule import Rule
from simulation.baselines.simple import CentralQueue, LeastTokens, PowerOfTwo, RoundRobin

RULES: dict[str, Callable[[Random], Rule]] = {
    "round-robin": lambda _: RoundRobin(),
    "least-tokens": lambda _: LeastTokens(),
    "power-of-two": PowerOfTwo,
    "central-fcfs": lambda _: CentralQueue(),
}
