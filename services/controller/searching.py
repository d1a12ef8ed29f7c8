"""The composition to begin with, by replay: what would have served a whole trace with the least mean TTFT. Pure, compiled.

`planning.py` has the paper's rule, which looks at one window and one length of a prompt. Here its choice is where a search
begins: half of the nodes at most change from one composition to another, then half as many, down to one, as long as a replay
says that it gets better. That is most of the pools of five nodes, and some hundred of the 47,905 of 64. Prompts that the trace
repeats count as cached wherever they go, and what replays leave out is left out here (`replaying.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from services.controller.forecast import Degrees, Question, Replayed, Rule
from services.controller.planning import Candidate
from services.controller.replaying import replayed
from shared.model.cost import Coefficients
from shared.model.lattice import Composition

REPLAYED_MAX = 20_000
STRETCH_US = 120 * 10**6
"""A longer trace is replayed in stretches of this length, which keep their rate and their bursts."""

Replay = Callable[[Sequence[Degrees]], Sequence[int]]
"""Pools → mean TTFT of each, in microseconds."""

_Nodes = tuple[Composition, ...]


class Tried(NamedTuple):
    """One candidate and its mean TTFT in the replay, at .95, 1.05 and 1.15 times the trace's rate."""

    candidate: Candidate
    ttft_us: int


def replay(arrivals: Sequence[Replayed], coefficients: Coefficients, rule: Rule) -> Replay:
    """What to search by."""
    kept = stretches(arrivals)

    def means_us(pools: Sequence[Degrees]) -> list[int]:
        ttft_ARP = replayed(Question(kept, tuple(pools), coefficients, rule))
        return [int(each) for each in ttft_ARP.mean(axis=(0, 1))]

    return means_us


def stretches(arrivals: Sequence[Replayed], most: int = REPLAYED_MAX) -> tuple[Replayed, ...]:
    """At most so many of a trace's arrivals, which are in order: every n-th stretch of two minutes, one behind the other."""
    number_of = [each.time_us // STRETCH_US for each in arrivals]
    alone = number_of[-1] + 1
    for every in range(min(alone, max(1, -(-len(arrivals) // most))), alone + 1):
        kept = [each for each, number in zip(arrivals, number_of, strict=True) if number % every == 0]
        if len(kept) <= most:
            break
    return tuple(
        each._replace(time_us=each.time_us // STRETCH_US // every * STRETCH_US + each.time_us % STRETCH_US)
        for each in kept[:most]
    )


def search(found: Sequence[Candidate], replay: Replay) -> list[Tried]:
    """The candidates that were tried, best first. `found` is what `plan` says: not empty, where to begin first."""
    by_nodes = {tuple(sorted(each.nodes)): each for each in found}
    forms = sorted({form for nodes in by_nodes for form in nodes})
    tried: dict[_Nodes, int] = {}

    def ask(pools: Sequence[_Nodes]) -> None:
        new = [each for each in dict.fromkeys(pools) if each in by_nodes and each not in tried]
        if new:
            tried.update(zip(new, replay([by_nodes[each].degrees for each in new]), strict=True))

    here = tuple(sorted(found[0].nodes))
    ask([here])
    step = max(1, len(here) // 2)
    while step:
        ask(list(_changed(here, forms, step)))
        best = min(tried, key=lambda nodes: (tried[nodes], nodes))
        step = step if tried[best] < tried[here] else step // 2
        here = best
    return [Tried(by_nodes[nodes], us) for nodes, us in sorted(tried.items(), key=lambda each: (each[1], each[0]))]


def _changed(nodes: _Nodes, forms: Sequence[Composition], step: int) -> Iterator[_Nodes]:
    """The pools in which at most `step` nodes have gone from one form to another."""
    counts = Counter(nodes)
    for form, other in permutations(forms, 2):
        if moved := min(step, counts[form]):
            left = counts - Counter({form: moved}) + Counter({other: moved})
            yield tuple(sorted(left.elements()))
