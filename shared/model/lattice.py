"""Which workers a node can be carved into: aligned power-of-two groups of ranks (paper, section 4).

A composition of a node with N ranks is the tuple of its workers' degrees from rank 0 up, such as (1, 1, 2, 4). A
degree-C worker starts at a multiple of C, so two workers can merge exactly when they are buddies, and every group a
node will ever need is known when it starts.

Every rank has the whole model, so what bounds degrees from below is the KV memory that its weights leave (`degree_min`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from shared.contracts.geometry import DEGREES as DEGREES
from shared.contracts.geometry import RANKS_MAX as RANKS_MAX
from shared.contracts.geometry import Composition as Composition
from shared.contracts.geometry import check_composition


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """The ranks `first_rank … first_rank + degree - 1` of one node."""

    first_rank: int
    degree: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.degree)


def groups_of(composition: Composition) -> tuple[Group, ...]:
    """The groups of a composition, from rank 0 up. ValueError says which worker is misaligned or of no known degree."""
    groups = []
    rank = 0
    for degree in check_composition(composition):
        groups.append(Group(rank, degree))
        rank += degree
    return tuple(groups)


def lattice(ranks: int) -> Iterator[Group]:
    """Every aligned group of a node with `ranks` ranks, small degrees first: 8 ranks have 8 + 4 + 2 + 1 groups."""
    for degree in DEGREES:
        yield from (Group(first, degree) for first in range(0, ranks - degree + 1, degree))


def degree_min(degrees: Collection[int], rank_tokens: int, least_tokens: int, *, cyclic: bool) -> int:
    """The smallest degree whose workers hold `least_tokens` of KV; the largest, if none does. Where the layout is not `cyclic`
    every rank holds all of a worker's blocks, and more ranks hold no more."""
    enough = (degree for degree in sorted(degrees) if degree * rank_tokens >= least_tokens)
    return next(enough, max(degrees)) if cyclic else min(degrees)


def splits(composition: Composition, degrees: Collection[int]) -> Iterator[Composition]:
    """Each composition in which one worker has become two of half its degree, from rank 0 up."""
    for index, degree in enumerate(composition):
        if degree > 1 and degree // 2 in degrees:
            yield (*composition[:index], degree // 2, degree // 2, *composition[index + 1 :])


def merges(composition: Composition, degrees: Collection[int]) -> Iterator[Composition]:
    """Each composition in which two buddies have become one worker, from rank 0 up."""
    for index, (one, other) in enumerate(pairwise(groups_of(composition))):
        if one.degree == other.degree and one.degree * 2 in degrees and one.first_rank % (2 * one.degree) == 0:
            yield (*composition[:index], 2 * one.degree, *composition[index + 2 :])


def parse_composition(text: str) -> Composition:
    """`"1,1,2,4"` as a composition. ValueError names what is wrong."""
    try:
        composition = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"composition {text!r}: give degrees separated by commas, such as 1,1,2,4") from None
    groups_of(composition)
    return composition
