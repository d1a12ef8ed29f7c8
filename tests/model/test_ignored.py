"""Which parameters say nothing as the others are: what the module says, and that simulations agree."""

from random import Random
from typing import Any

import pytest

from shared.contracts.events import EpochCommitted, ReplicationRequested
from shared.model.cost import load_coefficients
from shared.model.ignored import READ_UNDER, ignored
from shared.model.parameters import RECOMMENDED, Parameters
from simulation.policies.arrivals import requests_of
from simulation.policies.outcome import Rows
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.workloads.mixtures import Stretch, phased

TWO = '{"a": {}, "b": {}}'

OTHERWISE: dict[str, Any] = {
    "beta": 1.5, "lam": 1.0, "lam_vertumnus": 1.0, "adaptive_beta": False, "in_flight_prefixes": False,
    "ordered_queue": False, "prefix_fetch": False, "stealing": False, "calibration": False,
    "ratio_in_own_time": True, "share_s": 0.1, "held_s_max": 0.1,
    "decay": 0.3, "theta_inter": 0.001, "theta_reclaim": 1.9, "cache_operations_max": 1,
    "copy_price_s": 1e-6, "regret_fade_s": 2.0, "regret_horizon_s": 300.0, "reconfiguration_advisory": True,
    "up": 0.01, "down": 0.001, "persistence": 1, "long_share_by": "tokens", "long_delta": 0.001, "forecast_gain": 0.9,
}  # fmt: skip


def of(**changes: Any) -> Parameters:
    return Parameters.model_validate(changes)


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({}, "lam_vertumnus", "placement_policy=vertumnus"),
        ({}, "stealing", "placement_policy=vertumnus and worker_order=shortest-first"),
        ({"placement_policy": "vertumnus", "worker_order": "fcfs"}, "stealing",
         "placement_policy=vertumnus and worker_order=shortest-first"),
        ({"placement_policy": "vertumnus"}, "beta",
         "placement_policy=paper, or placement_policy=vertumnus and adaptive_beta=false, "
         "or placement_policy=vertumnus and two tenants or more"),
        ({"cache_policy": "lru"}, "theta_reclaim", "cache_policy=paper or regret"),
        ({"cache_policy": "regret"}, "decay", "cache_policy=lru or paper"),
        ({"reconfiguration_policy": "forecast"}, "up", "reconfiguration_policy=paper"),
        ({"reconfiguration_policy": "off"}, "persistence", "reconfiguration_policy=paper or forecast"),
        ({}, "share_s", "two tenants or more"),
        ({"placement_policy": "vertumnus", "calibration": False}, "ratio_in_own_time",
         "placement_policy=vertumnus and calibration=true"),
    ],
)  # fmt: skip
def test_what_nobody_reads_is_told_with_what_it_waits_for(changes: dict[str, Any], name: str, told: str) -> None:
    assert ignored(of(**changes))[name] == told


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "beta"),
        ({"placement_policy": "vertumnus", "adaptive_beta": False}, "beta"),
        ({"placement_policy": "vertumnus", "tenants": TWO}, "beta"),
        ({"placement_policy": "vertumnus", "tenants": TWO, "reconfiguration_policy": "forecast"}, "adaptive_beta"),
        ({"tenants": TWO}, "share_s"),
        ({"reconfiguration_policy": "forecast"}, "persistence"),
        ({"cache_policy": "lru"}, "theta_intra"),
        ({"placement_policy": "least-work"}, "fetch_mb_per_s"),
    ],
)
def test_what_somebody_reads_is_not_named(changes: dict[str, Any], name: str) -> None:
    assert name not in ignored(of(**changes))


def test_every_rule_is_of_a_parameter_that_is_there() -> None:
    assert READ_UNDER.keys() == OTHERWISE.keys() <= Parameters.model_fields.keys()
    assert all(
        name == "shared" or name in Parameters.model_fields
        for ways in READ_UNDER.values()
        for way in ways
        for name in way
    )


def decided(parameters: dict[str, Any]) -> tuple[bytes, list[Any]]:
    """The times to first token of a load that gets heavier, and what was decided on the way."""
    facts: list[Any] = []
    setup = Setup(((8,), (4, 4)), load_coefficients("qwen3_30b_a3b_h20"), parameters=parameters)
    simulation = Simulation(
        setup,
        lambda stored: (
            facts.append(stored.data) if isinstance(stored.data, EpochCommitted | ReplicationRequested) else None
        ),
    )
    simulation.run(requests_of(phased(Random(1), [Stretch(40, 2, 0.2), Stretch(30, 9, 0.0)]), setup.block_tokens))
    return b"".join(simulation.rows.column(name).tobytes() for name in Rows.COLUMNS), facts


@pytest.mark.parametrize(
    "policies",
    [
        {"placement_policy": "paper", "worker_order": "fcfs", "reconfiguration_policy": "forecast"},
        dict(RECOMMENDED),
        {"placement_policy": "least-work", "cache_policy": "paper", "reconfiguration_policy": "paper"},
    ],
    ids=["paper", "recommended", "least-work"],
)
def test_what_is_named_changes_no_decision_and_the_rest_does(policies: dict[str, Any]) -> None:
    """All of it at once, so that one parameter that is named by mistake is enough to fail."""
    unread = ignored(of(**policies)).keys()
    as_set = decided(policies)
    assert decided({**policies, **{name: OTHERWISE[name] for name in unread}}) == as_set
    assert decided({**policies, **{name: OTHERWISE[name] for name in OTHERWISE.keys() - unread}}) != as_set
