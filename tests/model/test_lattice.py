"""How a node is carved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.lattice import (
    DEGREES,
    RANKS_MAX,
    Composition,
    Group,
    degree_min,
    groups_of,
    lattice,
    merges,
    parse_composition,
    splits,
)


@st.composite
def compositions(draw: st.DrawFn) -> Composition:
    """Whole nodes of degree-8 workers, each split in halves as often as is drawn."""

    def split(degree: int) -> list[int]:
        if degree == 1 or draw(st.booleans()):
            return [degree]
        return split(degree // 2) + split(degree // 2)

    return tuple(degree for _ in range(draw(st.integers(1, RANKS_MAX // 8))) for degree in split(8))


def test_groups_by_hand() -> None:
    assert groups_of((1, 1, 2, 4)) == (Group(0, 1), Group(1, 1), Group(2, 2), Group(4, 4))
    assert list(Group(4, 4).ranks) == [4, 5, 6, 7]


def test_the_lattice_of_eight_ranks_by_hand() -> None:
    groups = list(lattice(8))
    assert len(groups) == 8 + 4 + 2 + 1
    assert groups[8:12] == [Group(0, 2), Group(2, 2), Group(4, 2), Group(6, 2)]


def test_the_lattice_of_six_ranks_has_only_groups_that_fit() -> None:
    assert list(lattice(6)) == [
        *(Group(rank, 1) for rank in range(6)),
        Group(0, 2),
        Group(2, 2),
        Group(4, 2),
        Group(0, 4),
    ]


@given(compositions())
def test_the_groups_of_a_composition_cover_every_rank_once_and_lie_in_the_lattice(composition: Composition) -> None:
    groups = groups_of(composition)
    assert [rank for group in groups for rank in group.ranks] == list(range(sum(composition)))
    assert set(groups) <= set(lattice(sum(composition)))


@given(compositions(), st.data())
def test_a_split_and_its_merge_are_compositions(composition: Composition, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(composition) - 1))
    degree = composition[place]
    if degree > 1:
        halves = (*composition[:place], degree // 2, degree // 2, *composition[place + 1 :])
        assert {rank for group in groups_of(halves) for rank in group.ranks} == set(range(sum(composition)))


@given(st.lists(st.sampled_from(DEGREES), min_size=1, max_size=20))
def test_a_list_of_degrees_is_a_composition_exactly_if_every_worker_is_aligned(degrees: list[int]) -> None:
    starts = [sum(degrees[:place]) for place in range(len(degrees))]
    fits = all(start % degree == 0 for start, degree in zip(starts, degrees, strict=True)) and sum(degrees) <= RANKS_MAX
    if fits:
        assert len(groups_of(tuple(degrees))) == len(degrees)
    else:
        with pytest.raises(ValueError, match="composition"):
            groups_of(tuple(degrees))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,x", "give degrees separated by commas"),
        ("", "give degrees separated by commas"),
        ("3", "degree 3 is not one of"),
        ("0", "degree 0 is not one of"),
        ("1,2", "a degree-2 worker cannot start at rank 1"),
        ("8," * 8 + "8", "72 ranks; a node has 1 to 64"),
    ],
)
def test_what_is_no_composition_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_composition(text)


@given(compositions())
def test_a_composition_is_read_back(composition: Composition) -> None:
    assert parse_composition(", ".join(map(str, composition))) == composition


def test_no_composition_is_empty() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        groups_of(())


@given(compositions())
def test_every_split_is_undone_by_one_merge_and_every_merge_by_one_split(composition: Composition) -> None:
    halved = list(splits(composition, DEGREES))
    assert len(halved) == sum(degree > 1 for degree in composition)
    assert all(composition in merges(each, DEGREES) for each in halved)
    assert all(composition in splits(each, DEGREES) for each in merges(composition, DEGREES))


def test_a_degree_that_is_not_allowed_is_no_outcome_of_a_step() -> None:
    assert list(splits((2, 2, 4), (2, 4))) == [(2, 2, 2, 2)]
    assert list(merges((4, 4), (2, 4))) == []


@pytest.mark.parametrize(
    ("rank_tokens", "least_tokens", "cyclic", "degree"),
    [
        (10_000, 10_000, True, 1),
        (10_000, 10_001, True, 2),
        (10_000, 32_768, True, 4),
        (10_000, 80_000, True, 8),
        (10_000, 80_001, True, 8),
        (10_000, 80_000, False, 1),
    ],
)
def test_the_least_degree_by_memory_by_hand(rank_tokens: int, least_tokens: int, cyclic: bool, degree: int) -> None:
    assert degree_min(DEGREES, rank_tokens, least_tokens, cyclic=cyclic) == degree


def test_the_least_degree_is_one_that_the_node_has() -> None:
    assert degree_min((4, 8), 10_000, 10_000, cyclic=True) == 4
    assert degree_min((1, 2), 10_000, 80_000, cyclic=True) == 2
