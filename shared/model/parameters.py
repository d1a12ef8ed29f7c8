"""What operators may change while the system runs: one versioned set, changed only by `parameters-changed`.

The defaults of the fields are the *base*, version 0: what every fold begins with, and what old records were decided by. They
name the paper's policies, with the values that measured best where the paper gives none (β, λ, thresholds, windows), and stay
as they are. What is better by now is in `RECOMMENDED`, which a new pool is opened with (`services/controller/opening.py`).
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.contracts.envelope import Stored
from shared.contracts.events import Frozen, ParametersChanged, Thawed
from shared.model.tenants import Tenants, twice

PERSISTENCE_MAX = 20
"""Windows that a signal may have to last, and so how many of their demands are kept."""

WorkerOrder = Literal["shortest-first", "fcfs"]
PlacementPolicy = Literal["paper", "vertumnus", "least-work"]

WAIT_NS_MAX = 30 * 10**9
"""Under shortest-first, whoever has waited this long goes before all others (model, 2.2). Workers order by it, and routers
reckon with it."""

LOAD_WINDOW_S, LOAD_PPM_MAX = 10, 900_000
"""Under an adaptive β: whole seconds that ρ is measured over, and the ρ from which on β rises no more: it is 10 there, and
would be without bound at a load of 1. Routers price by it, and forecasts replay it."""


class Parameters(BaseModel):
    """`version` counts changes; every decision names it. Units are in the names."""

    # An event has no number that is not finite: it would say `null`, and every fold refuse the change.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(default=0, description="how many changes there were; every decision names it")
    frozen: bool = Field(default=False, description="by `vertumnus freeze`, until `thaw`")

    placement_policy: PlacementPolicy = "paper"
    beta: float = Field(default=3.0, ge=1, le=100, description="paper: weight of the service time (β)")
    lam: float = Field(default=0.1, ge=0, le=10, description="paper: price of extra GPU-seconds (λ)")
    lam_vertumnus: float = Field(default=0.05, ge=0, le=10, description="vertumnus: price of extra GPU-seconds (λ)")
    adaptive_beta: bool = Field(default=True, description="vertumnus: β follows the load, instead of being `beta`")
    in_flight_prefixes: bool = Field(default=True, description="vertumnus: what queued requests will leave is reusable")
    ordered_queue: bool = Field(
        default=True, description="vertumnus: only work ahead counts, and whom a request delays"
    )
    prefix_fetch: bool = Field(
        default=True, description="vertumnus: prefixes are read from other workers if that is cheaper"
    )
    stealing: bool = Field(default=True, description="vertumnus: queued requests move to idle workers")
    calibration: bool = Field(default=True, description="vertumnus: a worker's measured over predicted time is priced")
    ratio_in_own_time: bool = Field(
        default=False, description="vertumnus: that ratio counts in a request's own time, not in what others pay for it"
    )
    refit: bool = Field(
        default=False, description="coefficients are fitted anew to measured prefills, where that is clearly better"
    )
    fetch_mb_per_s: int = Field(
        default=10_000, ge=1, le=10_000_000, description="between workers, until a source's own bandwidth was measured"
    )
    fetch_half_life_s: int = Field(
        default=0, ge=0, le=86_400, description="half of a measured bandwidth is forgotten after this; 0: it never is"
    )
    worker_order: WorkerOrder = Field(
        default="shortest-first",
        description="least predicted work first, packed and in chunks; or by arrival and one whole prompt at a time (paper)",
    )
    attempts_max: int = Field(default=4, ge=1, le=20, description="workers that one request is tried on")

    tenants: Tenants = Field(default=(), description="limits and weights, as JSON: an object of entries by tenant")
    queued_tokens_max: int = Field(
        default=0, ge=0, le=10**12, description="of all prompts without their first token; 0 for no limit"
    )
    share_s: float = Field(
        default=2.0, ge=0, le=60, description="work for this long on all workers is what tenants have parts of"
    )
    held_s_max: float = Field(default=30.0, gt=0, le=600, description="a request waits no longer for its tenant's turn")

    window_s: int = Field(default=20, ge=1, le=3600, description="H, length of an observation window")
    long_tokens: int = Field(default=32_768, ge=1, description="a prompt above this is long (paper: 32K)")

    scan_every_s: float = Field(default=1.0, ge=0.05, le=3600, description="T, between two scans of the trie")
    decay: float = Field(default=0.8, gt=0, lt=1, description="both statistics are multiplied by it after a scan")
    cache_policy: Literal["lru", "paper", "regret"] = Field(
        default="lru",
        description="who replicates and reclaims prefixes: nobody; Algorithm 2's thresholds; what routing lost for want of one",
    )
    theta_inter: float = Field(default=0.3, ge=0.001, description="θ_inter, missed seconds that ask for a first copy")
    theta_intra: float = Field(default=2.0, ge=0.001, description="θ_intra, accesses per copy that ask for another")
    theta_reclaim: float = Field(default=0.3, ge=0.001, description="θ_reclaim, accesses per copy too few to keep it")

    reconfiguration_policy: Literal["off", "paper", "forecast"] = Field(
        default="paper",
        description="who changes compositions: only operators, the paper's thresholds, or replays of what has just arrived",
    )
    reconfiguration_advisory: bool = Field(
        default=False, description="record what the policy would do, and do nothing of it"
    )
    up: float = Field(
        default=0.75, gt=0, le=10, description="share of the capacity above which demand asks for a split"
    )
    down: float = Field(
        default=0.35, ge=0, le=10, description="share of the capacity below which demand asks for a merge"
    )
    persistence: int = Field(
        default=3, ge=1, le=PERSISTENCE_MAX, description="m, windows in a row for which a signal must hold"
    )
    long_share_by: Literal["requests", "tokens"] = Field(
        default="requests", description="which share of long prompts is watched"
    )
    long_delta: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="change of that share since the last commit that asks for a step; .10 fits the share of tokens",
    )
    forecast_gain: float = Field(
        default=0.03, ge=0, le=1, description="how much less mean TTFT a forecast must promise for a move"
    )

    cache_operations_max: int = Field(default=16, ge=1, le=32, description="of each kind and scan")
    copy_price_s: float = Field(default=0.004, gt=0, le=10, description="regret that a copied block must be worth")
    regret_fade_s: float = Field(default=10.0, ge=1, le=3600, description="after which regret counts a third (1/e)")
    regret_horizon_s: float = Field(default=20.0, ge=1, le=3600, description="over which a copy has to pay")

    drain_s_max: float = Field(default=15.0, gt=0, le=600, description="a drain that takes longer is given up")
    reconfigurations_max: int = Field(default=2, ge=1, le=64, description="nodes of the pool that change at one time")

    @model_validator(mode="after")
    def _reclaim_below_intra(self) -> Self:
        if self.theta_reclaim >= self.theta_intra:
            raise ValueError(f"theta_reclaim: {self.theta_reclaim} must be below theta_intra ({self.theta_intra})")
        return self

    @property
    def shared(self) -> bool:
        """Whether tenants share the workers."""
        return len(self.tenants) > 1

    @model_validator(mode="after")
    def _each_tenant_once(self) -> Self:
        if (tenant := twice(self.tenants)) is not None:
            raise ValueError(f"tenants: {tenant!r} has two entries")
        return self

    @model_validator(mode="after")
    def _down_below_up(self) -> Self:
        if self.down >= self.up:
            raise ValueError(f"down: {self.down} must be below up ({self.up})")
        return self


RECOMMENDED: Final[Mapping[str, Any]] = {
    "placement_policy": "vertumnus",
    "ratio_in_own_time": True,
    "refit": True,
    "fetch_half_life_s": 60,
    "cache_policy": "regret",
    "scan_every_s": 0.5,
    "reconfiguration_policy": "forecast",
}
"""What was measured to be better than the paper's policies (docs/figures.md), or mends what older records were decided by, for
pools whose record begins now. May be changed at any time: who has it has it from an event."""


NOT_BY_HAND: Final = {"version": "it counts the changes", "frozen": "`vertumnus freeze` and `thaw` do it"}


def unlike_new_pools(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a pool with these values would have to set to be as new ones are."""
    return {name: value for name, value in RECOMMENDED.items() if values[name] != value}


def changed(parameters: Parameters, changes: Mapping[str, Any]) -> Parameters:
    """The next version. ValidationError names the field and its limit; `version` and `frozen` are not set by hand."""
    for name, instead in NOT_BY_HAND.items():
        if name in changes:
            raise ValueError(f"{name} cannot be set: {instead}")
    return Parameters.model_validate({**parameters.model_dump(), **changes, "version": parameters.version + 1})


def evolve(parameters: Parameters, stored: Stored) -> Parameters:
    """Fold one event."""
    match stored.data:
        case ParametersChanged() as data:
            return _folded(parameters, data)
        case Frozen():
            return parameters.model_copy(update={"frozen": True})
        case Thawed():
            return parameters.model_copy(update={"frozen": False})
        case _:
            return parameters


def _folded(parameters: Parameters, data: ParametersChanged) -> Parameters:
    """A change that a newer controller let through, and this code refuses, changes the number alone: a fold goes on."""
    try:
        valid = changed(parameters, data.changes)
    except ValueError:
        valid = parameters
    return valid.model_copy(update={"version": data.parameters_version})
