"""What each tenant may take of the pool. A part of the parameters, so that every router decides by the same limits.

Tenants that are not listed count together as one, `OTHERS`: whoever makes up names gains nothing. Two or more entries share
the workers by their weights; with fewer nobody is held back for anybody.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shared.contracts.ids import TenantId

OTHERS = TenantId("*")
"""Everybody who has no entry of his own."""

TENANTS_MAX = 256
PRIORITY_MAX = 9


class TenantLimits(BaseModel):
    """One tenant's entry; 0 is no limit. Counted over all routers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: TenantId
    weight: int = Field(default=1, ge=1, le=1_000, description="its part of the workers is weight over all weights")
    priority_max: int = Field(default=0, ge=0, le=PRIORITY_MAX, description="what its requests may ask for")
    requests_max: int = Field(default=0, ge=0, le=1_000_000, description="open at one time")
    tokens_per_minute: int = Field(default=0, ge=0, le=10**12, description="of prompts, cached or not")
    queued_tokens_max: int = Field(default=0, ge=0, le=10**12, description="of prompts without their first token")
    slo_ms: int = Field(default=0, ge=0, le=3_600_000, description="time to first token, for requests that name none")
    hard_slo: bool = Field(default=False, description="refuse what would miss it, unless the request says otherwise")


def _listed(given: Any) -> Any:
    """As an operator writes it: JSON, a list of entries or an object of them by name."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
    if isinstance(given, dict):
        if odd := [name for name, entry in given.items() if not isinstance(entry, dict)]:
            raise ValueError(f"{odd[0]}: an object is needed")
        return [{**entry, "tenant": name} for name, entry in given.items()]
    return given


Tenants = Annotated[tuple[TenantLimits, ...], BeforeValidator(_listed), Field(max_length=TENANTS_MAX)]


def twice(tenants: Iterable[TenantLimits]) -> TenantId | None:
    """A tenant that has two entries."""
    counts = Counter(each.tenant for each in tenants)
    return next((tenant for tenant, count in counts.items() if count > 1), None)


class Shares:
    """The entries, by name. Made once for each set of parameters."""

    __slots__ = ("_of", "_others", "listed", "shared", "weights")

    def __init__(self, tenants: Iterable[TenantLimits]) -> None:
        self._of: Mapping[TenantId, TenantLimits] = {each.tenant: each for each in tenants}
        self._others = self._of.get(OTHERS) or TenantLimits(tenant=OTHERS)
        self.listed = frozenset(self._of) - {OTHERS}
        self.weights = sum(each.weight for each in self._of.values())
        self.shared = len(self._of) > 1

    def __bool__(self) -> bool:
        return bool(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self._of == other._of

    __hash__ = None  # type: ignore[assignment]

    def of(self, tenant: TenantId) -> TenantLimits:
        """The entry that counts for this tenant."""
        return self._of.get(tenant, self._others)

    def part(self, limits: TenantLimits, whole: int) -> int:
        """How much of the whole is this entry's, by its weight."""
        weights = self.weights if limits.tenant in self._of else self.weights + limits.weight
        return whole * limits.weight // weights
