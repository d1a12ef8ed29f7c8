"""What operators may change."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contracts.envelope import EventData
from shared.contracts.events import Frozen, ParametersChanged, RouterRegistered, Thawed
from shared.contracts.ids import RouterId
from shared.model.parameters import Parameters, changed, evolve
from tests.support.story import Story


def folded(*facts: EventData) -> Parameters:
    story = Story()
    story.tell(*facts)
    parameters = Parameters()
    for stored in story.events:
        parameters = evolve(parameters, stored)
    return parameters


def change(number: int, **changes: Any) -> ParametersChanged:
    return ParametersChanged(parameters_version=number, changes=changes, asked_by="ops")


def test_the_defaults_are_the_papers() -> None:
    parameters = Parameters()
    assert (parameters.beta, parameters.lam, parameters.window_s, parameters.long_tokens) == (3.0, 0.1, 20, 32_768)
    assert (parameters.theta_inter, parameters.theta_intra, parameters.theta_reclaim) == (0.3, 2.0, 0.3)
    assert (parameters.decay, parameters.scan_every_s) == (0.8, 1.0)


def test_a_change_names_only_what_it_changes() -> None:
    parameters = folded(change(1, beta=5.0), change(2, lam=0.2), change(3, beta=4.0))
    assert (parameters.version, parameters.beta, parameters.lam) == (3, 4.0, 0.2)


def test_freezing_ends_with_thawing_and_is_no_change() -> None:
    frozen = folded(change(1, beta=5.0), Frozen(asked_by="ops"))
    assert (frozen.frozen, frozen.version, frozen.beta) == (True, 1, 5.0)
    assert folded(Frozen(asked_by="ops"), change(1, beta=5.0)).frozen
    assert not folded(Frozen(asked_by="ops"), Thawed(asked_by="ops")).frozen


def test_other_events_change_nothing() -> None:
    assert folded(RouterRegistered(router=RouterId("r1"))) == Parameters()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beta": 0.5}, "beta"),
        ({"lam": -1}, "lam"),
        ({"window_s": 0}, "window_s"),
        ({"decay": 1}, "decay"),
        ({"attempts_max": 100}, "attempts_max"),
        ({"placement_policy": "best"}, "placement_policy"),
        ({"beat": 3}, "beat"),
        ({"theta_reclaim": 2.0}, "theta_reclaim: 2.0 must be below theta_intra"),
        ({"version": 9}, "version cannot be set"),
        ({"frozen": True}, "frozen cannot be set"),
        ({"theta_inter": "inf"}, "theta_inter"),
    ],
)
def test_a_bad_change_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        changed(Parameters(), changes)


@pytest.mark.parametrize("changes", [{"of_a_later_version": 1}, {"beta": 1e9}, {"theta_reclaim": 9.0}])
def test_the_fold_goes_on_over_a_change_that_this_version_does_not_know(changes: dict[str, Any]) -> None:
    """Services of two versions fold one log: what a newer controller has let through must not end an older router."""
    parameters = folded(change(1, beta=5.0), change(2, **changes), change(3, lam=0.2))
    assert (parameters.version, parameters.beta, parameters.lam) == (3, 5.0, 0.2)


@given(st.lists(st.sampled_from([change(1, beta=5.0), change(1, lam=0.3), Frozen(asked_by="o"), Thawed(asked_by="o")])))
def test_parameters_are_frozen_and_always_valid(facts: list[EventData]) -> None:
    parameters = folded(*facts)
    assert Parameters.model_validate(parameters.model_dump()) == parameters
    with pytest.raises(ValidationError):
        parameters.beta = 9.0  # type: ignore[misc]
