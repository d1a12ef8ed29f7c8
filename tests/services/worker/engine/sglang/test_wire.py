"""Verbs survive the trip through a map of numbers, and nothing out of bounds gets in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sglang.plugin import wire
from services.worker.engine.sglang.plugin.wire import Commit, Evict, InForce, Prepare, Release
from shared.model.lattice import Composition, groups_of
from tests.support.compositions import compositions

EPOCHS = st.integers(1, (1 << 53) - 1)
HASHES = st.integers(-(1 << 63), (1 << 63) - 1)


@given(compositions(8))
def test_a_composition_is_the_mask_of_its_first_units(composition: Composition) -> None:
    mask = wire.mask_of(composition)
    assert wire.composition_of(mask, sum(composition)) == composition
    assert {unit for unit in range(64) if mask >> unit & 1} == {group.first_rank for group in groups_of(composition)}


def test_the_mask_of_211() -> None:
    assert wire.mask_of((2, 1, 1)) == 0b1101


@given(st.integers(-4, 300), st.integers(-1, 9))
def test_a_mask_is_a_composition_or_refused(mask: int, units: int) -> None:
    try:
        composition = wire.composition_of(mask, units)
    except ValueError:
        return
    assert wire.mask_of(composition) == mask
    assert sum(composition) == units


@given(
    st.one_of(
        st.builds(Prepare, EPOCHS, compositions(4, exactly=True), st.floats(0.1, wire.LEASE_S_MAX)),
        st.builds(Commit, EPOCHS, compositions(4, exactly=True), st.floats(0.1, wire.VOTE_S_MAX)),
        st.builds(Release, EPOCHS),
        st.builds(Evict, st.integers(1, 15), st.lists(HASHES, min_size=1, max_size=64).map(tuple)),
    )
)
def test_a_verb_comes_out_as_it_went_in(verb: wire.Verb) -> None:
    numbers = json.loads(json.dumps(wire.encode(verb)))
    assert all(isinstance(value, int | float) for value in numbers.values())
    assert wire.decode(wire.tell(numbers, InForce((2, 2))), 4) == verb


@given(compositions(4, exactly=True), st.booleans())
def test_units_are_told_what_the_controller_knows(composition: Composition, lapsed: bool) -> None:
    forged = {**wire.encode(Release(3)), "vertumnus_in_force": 1, "vertumnus_lapsed": 0}
    assert wire.told(wire.tell(forged, InForce(composition, lapsed)), 4) == InForce(composition, lapsed)


def test_other_peoples_messages_are_left_alone() -> None:
    assert wire.decode({"max_running_requests": 4}, 4) is None


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"vertumnus_op": 9}, "9"),
        ({"vertumnus_op": 1, "vertumnus_epoch": 1, "vertumnus_starts": 0b1101}, "vertumnus_lease_s"),
        (
            {"vertumnus_op": 1, "vertumnus_epoch": 1, "vertumnus_starts": 0b1011, "vertumnus_lease_s": 1},
            "start at rank 1",
        ),
        ({"vertumnus_op": 1, "vertumnus_epoch": 1, "vertumnus_starts": 0b11111, "vertumnus_lease_s": 1}, "4 units"),
        ({"vertumnus_op": 1, "vertumnus_epoch": 1, "vertumnus_starts": 1, "vertumnus_lease_s": 1e9}, "lease_s"),
        ({"vertumnus_op": 2, "vertumnus_epoch": 1, "vertumnus_starts": 1, "vertumnus_vote_s": 0}, "vote_s"),
        ({"vertumnus_op": 3, "vertumnus_epoch": 0}, "epoch"),
        ({"vertumnus_op": 3, "vertumnus_epoch": 1.5}, "whole"),
        ({"vertumnus_op": 4, "vertumnus_units": 1}, "blocks"),
    ],
)
def test_a_bad_verb_is_refused_by_field(numbers: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        wire.decode(numbers, 4)


def test_a_verb_that_did_not_pass_the_controller_is_refused() -> None:
    with pytest.raises(ValueError, match="controller"):
        wire.told(wire.encode(Release(1)), 4)


@pytest.mark.parametrize("name", ["vertumnus_epoch", "vertumnus_starts", "vertumnus_lease_s"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 10**400])
def test_a_number_that_is_none_is_refused(name: str, value: float) -> None:
    """Any other error would end the process that reads it, and with it the server."""
    with pytest.raises(ValueError, match=r"\w"):
        wire.decode({**wire.encode(Prepare(3, (2, 2), 1.0)), name: value}, 4)
