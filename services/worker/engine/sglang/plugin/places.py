"""Where a unit stands in a composition, as SGLang must see it.

SGLang holds each rank to `tp_size = attn_tp · attn_dp · attn_cp` and `tp_rank = (attn_dp_rank · attn_cp + attn_cp_rank)
· attn_tp + attn_tp_rank` (`runtime_context._validate_parallel`). Both hold, group by group, for a rank that takes the
whole server to be made of groups like its own, and that is why only aligned groups of a power of two will do. Ranks of
other groups see other layouts.
"""

from dataclasses import dataclass

from shared.model.lattice import Composition, Group, groups_of


@dataclass(frozen=True, slots=True)
class Place:
    """A unit's group and what its ranks take the server's layout to be."""

    group: Group
    cp_rank: int
    dp_rank: int
    dp_size: int

    @property
    def leads(self) -> bool:
        return self.cp_rank == 0


def place(composition: Composition, unit: int) -> Place:
    """The place of one of the composition's units."""
    units = sum(composition)
    group = next(group for group in groups_of(composition) if unit in group.ranks)
    return Place(group, unit - group.first_rank, unit // group.degree, units // group.degree)


def touched(old: Composition, new: Composition) -> tuple[int, ...]:
    """Units whose group changes, in order. They are whole groups of both compositions."""
    assert sum(old) == sum(new), "both divide the same units"
    return tuple(unit for unit in range(sum(old)) if place(old, unit).group != place(new, unit).group)


def merges(old: Composition, new: Composition, group: Group) -> bool:
    """Whether a group of `new` is made of several groups of `old`: their prefix trees must become one."""
    return place(old, group.first_rank).group.degree < group.degree and group in groups_of(new)
