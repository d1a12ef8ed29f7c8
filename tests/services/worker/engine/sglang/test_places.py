"""Places keep to SGLang's layout rule, and what is touched is whole groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sglang.plugin.places import merges, place, touched
from shared.model.lattice import Composition, Group, groups_of
from tests.support.compositions import compositions

TWO = st.sampled_from((1, 2, 4, 8)).flatmap(lambda n: st.tuples(compositions(n, True), compositions(n, True)))


@given(compositions(16))
def test_every_place_keeps_to_the_layout_rule(composition: Composition) -> None:
    for unit in range(sum(composition)):
        here = place(composition, unit)
        assert here.dp_rank * here.group.degree + here.cp_rank == unit
        assert here.leads == (unit == here.group.first_rank)
        if sum(composition) % here.group.degree == 0:
            assert here.dp_size * here.group.degree == sum(composition)


@given(TWO)
def test_what_is_touched_is_whole_groups_of_both(both: tuple[Composition, Composition]) -> None:
    old, new = both
    units = set(touched(old, new))
    assert (not units) == (old == new)
    assert units == set(touched(new, old))
    for group in (*groups_of(old), *groups_of(new)):
        assert set(group.ranks) <= units or not units & set(group.ranks)


@given(TWO)
def test_a_touched_group_merges_splits_or_does_neither(both: tuple[Composition, Composition]) -> None:
    old, new = both
    for group in groups_of(new):
        parts = {place(old, unit).group for unit in group.ranks}
        assert merges(old, new, group) == (len(parts) > 1)


def test_211_by_hand() -> None:
    assert touched((1, 1, 1, 1), (2, 1, 1)) == (0, 1)
    assert touched((2, 2), (1, 1, 2)) == (0, 1)
    assert touched((4,), (2, 1, 1)) == (0, 1, 2, 3)
    assert merges((1, 1, 2), (2, 2), Group(0, 2))
    assert not merges((1, 1, 2), (2, 2), Group(2, 2))
    assert not merges((4,), (2, 2), Group(0, 2))
    assert place((2, 1, 1), 3).dp_rank == 3
    assert place((1, 1, 2), 3).dp_rank == 1


def test_compositions_of_different_servers_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="same units"):
        touched((2,), (4,))
