"""What the cache manager reads from its environment."""

from pydantic import Field

from shared.model.cost import CoefficientsName
from shared.runtime.settings import ServiceSettings


class CacheManagerSettings(ServiceSettings):
    """`VERTUMNUS_*`, see `ServiceSettings`. Everything that may change while it runs is a parameter of the pool."""

    coefficients: CoefficientsName = Field(
        default="qwen3_30b_a3b_h20",
        description="cost model that prices a missed block: a name, or the path of your own (.json)",
    )
    snapshot_every_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="how often the leader keeps its folded state, for the next start to go on from",
    )
