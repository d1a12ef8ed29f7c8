"""What a flood does to another tenant, what entries do to a pool with one, and by how much several routers overdo a limit."""

from dataclasses import replace
from typing import Any

import pytest

from shared.contracts.envelope import Stored
from shared.contracts.events import ENDS, ParametersChanged, RequestHeld, RequestReceived, RequestRejected
from shared.contracts.ids import TenantId
from shared.model.cost import load_coefficients
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.policies.studies import policy
from simulation.policies.tenants import FLOODING, OTHER, Tenant, arrivals, flooded

SETUP = Setup(((4, 4), (4, 4), (8,)), load_coefficients("qwen3_30b_a3b_h20"))
"""Four workers of degree 4 and one of degree 8: about 9 of the requests a second."""

ENTRIES: dict[str, Any] = {FLOODING: {}, OTHER: {}}


def setup_of(name: str, **parameters: Any) -> Setup:
    base = policy(name).of(SETUP)
    return replace(base, parameters={**base.parameters, **parameters})


@pytest.mark.parametrize("name", ["paper", "vertumnus"])
def test_a_flood_moves_the_others_p90_by_less_than_a_fifth(name: str) -> None:
    """Before it one tenant asks for 4 requests a second, then for 20; the other has 1.5 a second throughout."""
    sharing = setup_of(name, tenants=ENTRIES)
    before, during = (flooded(sharing, [Tenant(FLOODING, rate), Tenant(OTHER, 1.5)], 40, 1) for rate in (4, 20))
    assert during[OTHER].p90_s < 1.2 * before[OTHER].p90_s
    assert during[OTHER].rejected == 0
    assert during[FLOODING].held > 100
    for_all = flooded(setup_of(name), [Tenant(FLOODING, 20), Tenant(OTHER, 1.5)], 40, 1)
    assert for_all[OTHER].p90_s > 3 * before[OTHER].p90_s, "without shares it would"


def events_of(setup: Setup) -> list[bytes]:
    told: list[bytes] = []

    def hear(stored: Stored) -> None:
        if not isinstance(stored.data, ParametersChanged):
            version = {"parameters_version"} & type(stored.data).model_fields.keys()
            told.append(stored.data.model_dump_json(exclude=version).encode())

    Simulation(setup, hear).run(arrivals([Tenant(FLOODING, 8)], 20, setup.block_tokens, 1))
    return told


@pytest.mark.parametrize("name", ["paper", "vertumnus"])
def test_one_tenant_is_served_as_if_there_were_no_entries(name: str) -> None:
    alone = events_of(setup_of(name))
    assert alone == events_of(setup_of(name, tenants={FLOODING: {"weight": 3}}, share_s=0))


@pytest.mark.parametrize("age_s", [0.0, 0.05, 1.0])
def test_several_routers_overdo_a_limit_by_what_they_have_not_heard_of(age_s: float) -> None:
    """Four routers, 10 requests at one time: no more than those and what the other three admit within the age of a view."""
    limit, rate = 10, 40.0
    setup = replace(setup_of("paper", tenants={FLOODING: {"requests_max": limit}}), routers=4, view_age_s=age_s, seed=1)
    opened: set[str] = set()
    most, refused, arrived_ns = 0, 0, list[int]()

    def hear(stored: Stored) -> None:
        nonlocal most, refused
        match stored.data:
            case RequestReceived() as data:
                opened.add(data.request)
                arrived_ns.append(stored.event.time_ns)
            case ended if isinstance(ended, ENDS):
                opened.discard(ended.request)
                refused += isinstance(ended, RequestRejected)
            case _:
                most = max(most, len(opened))

    Simulation(setup, hear).run(arrivals([Tenant(TenantId(FLOODING), rate)], 20, setup.block_tokens, 1))
    window_ns = round(age_s * 1e9)
    burst = max(sum(at - window_ns < each <= at for each in arrived_ns) for at in arrived_ns) if age_s else 0
    assert limit <= most <= limit + burst
    assert refused > 100


def test_who_waits_goes_on_at_each_of_several_routers() -> None:
    """Nobody is left behind where the one whose share is freed asked another router."""
    setup = replace(setup_of("paper", tenants=ENTRIES, held_s_max=600), routers=3, view_age_s=0.05)
    held: list[str] = []
    simulation = Simulation(
        setup, lambda stored: held.append(stored.data.request) if isinstance(stored.data, RequestHeld) else None
    )
    outcome = simulation.run(arrivals([Tenant(FLOODING, 10), Tenant(OTHER, 1)], 20, setup.block_tokens, 1))
    simulation.check()
    assert len(held) > 20
    assert outcome.unserved == 0
