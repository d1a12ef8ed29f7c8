"""A flood: one tenant asks for more than the pool has, and another goes on as before."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np

from shared.contracts.envelope import Stored
from shared.contracts.events import RequestCompleted, RequestHeld, RequestReceived, RequestRejected
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, RequestId, TenantId
from simulation.policies.agenda import NS_PER_S
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup

FLOODING, OTHER = TenantId("flooding"), TenantId("other")

MEDIAN_TOKENS, SIGMA, TOKENS_MAX = 6_000, 0.8, 60_000
"""Of prompts without shared prefixes, log-normal: what a flood does to the others shows without caches."""


class Tenant(NamedTuple):
    """Poisson arrivals of one tenant."""

    name: TenantId
    per_s: float


class Told(NamedTuple):
    """What became of one tenant's requests."""

    requests: int
    served: int
    held: int
    rejected: int
    mean_s: float
    p90_s: float


def arrivals(tenants: list[Tenant], seconds: float, block_tokens: int, seed: int) -> list[Asked]:
    """In order of time. A tenant's own do not depend on what others ask."""
    return sorted(each for tenant in tenants for each in _of(tenant, seconds, block_tokens, seed))


def _of(tenant: Tenant, seconds: float, block_tokens: int, seed: int) -> Iterator[Asked]:
    chance, at_s = Random(f"{seed} {tenant.name}"), 0.0
    while tenant.per_s and (at_s := at_s + chance.expovariate(tenant.per_s)) < seconds:
        tokens = min(TOKENS_MAX, max(block_tokens, round(MEDIAN_TOKENS * chance.lognormvariate(0, SIGMA))))
        chain = tuple(BlockId(chance.randbytes(BLOCK_ID_BYTES)) for _ in range(tokens // block_tokens))
        yield Asked(round(at_s * NS_PER_S), tokens, chain, tenant=tenant.name)


class Ears:
    """Listens to a run, and remembers who waited how long."""

    def __init__(self) -> None:
        self._tenant_of: dict[RequestId, TenantId] = {}
        self._ttft_us: dict[TenantId, list[int]] = {}
        self._held: dict[TenantId, int] = {}
        self._rejected: dict[TenantId, int] = {}

    def hear(self, stored: Stored) -> None:
        """The next event."""
        match stored.data:
            case RequestReceived() as data:
                self._tenant_of[data.request] = data.tenant
            case RequestHeld() as data:
                self._held[data.tenant] = self._held.get(data.tenant, 0) + 1
            case RequestRejected() as data:
                tenant = self._tenant_of[data.request]
                self._rejected[tenant] = self._rejected.get(tenant, 0) + 1
            case RequestCompleted() as data:
                self._ttft_us.setdefault(self._tenant_of[data.request], []).append(data.ttft_us)
            case _:
                pass

    def told(self, tenant: TenantId) -> Told:
        """Of a tenant that was served at least once."""
        times_s = np.array(self._ttft_us[tenant]) / 1e6
        requests = sum(each == tenant for each in self._tenant_of.values())
        held, rejected = self._held.get(tenant, 0), self._rejected.get(tenant, 0)
        return Told(requests, len(times_s), held, rejected, float(times_s.mean()), float(np.percentile(times_s, 90)))


def flooded(setup: Setup, tenants: list[Tenant], seconds: float, seed: int) -> dict[TenantId, Told]:
    """What each tenant meets."""
    ears = Ears()
    simulation = Simulation(replace(setup, seed=seed), ears.hear)
    simulation.run(arrivals(tenants, seconds, setup.block_tokens, seed))
    simulation.check()
    return {each.name: ears.told(each.name) for each in tenants}
