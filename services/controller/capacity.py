"""κ_C of a worker: profiled where somebody measured it, else the configured share of the window. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from shared.model.capacity import Capacities


class Capacity(NamedTuple):
    """The window demand that a worker carries within its SLO, and the version of the set that says so; None for an estimate."""

    us: int
    version: str | None = None


CapacityOf = Callable[[int], Capacity]
"""κ_C by degree."""


def capacity(profiled: Capacities, default_share: float, window_us: int, degree: int) -> Capacity:
    """Demand is in seconds of the worker that it goes to, so without a profile every degree has the same share."""
    share = profiled.capacity_shares.get(degree)
    if share is None:
        return Capacity(round(default_share * window_us))
    return Capacity(round(share * window_us), profiled.version)
