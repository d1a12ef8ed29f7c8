"""κ_C: the largest window demand that one degree-C worker still carries within its SLO (paper, section 4.3).

It is written as a share of the window, beside the coefficients in whose seconds demand is counted: a share holds for any
length of window and for modelled time that runs fast. `vertumnus capacity` measures it.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from shared.contracts.geometry import Degree
from shared.model.cost import read_set

Share = Annotated[float, Field(ge=0, le=4)]
"""Above 1 where coefficients predict more seconds than a prefill takes."""


class Capacities(BaseModel):
    """The profiled κ_C / H of a set, by degree. Sets that nobody has profiled have none."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str
    capacity_shares: dict[Degree, Share] = Field(default_factory=dict)


def load_capacities(name: str) -> Capacities:
    """Of the set that `load_coefficients` loads by this name. Errors: the same."""
    return read_set(name, Capacities)


def _readable(name: str) -> str:
    load_capacities(name)
    return name


ProfiledName = Annotated[str, AfterValidator(_readable)]
"""For settings: a set, by name or path, whose profiled κ_C are of interest."""
