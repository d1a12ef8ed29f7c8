"""While a record is folded, unreachable objects are looked for seldom; afterwards as before."""

import gc
from collections.abc import Iterator

import pytest

from replay.garbage import EVERY_OBJECTS, seldom_collected


@pytest.fixture
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield 701, 11, 12
    gc.set_threshold(*before)


def test_it_is_as_before_whatever_ends_the_folding(threshold: tuple[int, int, int]) -> None:
    def fail() -> None:
        with seldom_collected():
            assert gc.get_threshold() == (EVERY_OBJECTS, *threshold[1:])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == threshold


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_that_overlap_leave_it_as_it_was(threshold: tuple[int, int, int], first_to_end: int) -> None:
    """Two verifications in one process end in any order."""
    both = [seldom_collected(), seldom_collected()]
    for each in both:
        each.__enter__()
    assert gc.get_threshold()[0] == EVERY_OBJECTS
    both.pop(first_to_end).__exit__(None, None, None)
    both.pop().__exit__(None, None, None)
    assert gc.get_threshold() == threshold


def test_who_collects_more_seldom_already_is_left_alone(threshold: tuple[int, int, int]) -> None:
    gc.set_threshold(2 * EVERY_OBJECTS, *threshold[1:])
    with seldom_collected():
        assert gc.get_threshold()[0] == 2 * EVERY_OBJECTS
    assert gc.get_threshold()[0] == 2 * EVERY_OBJECTS
