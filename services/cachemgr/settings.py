"""What the cache manager reads from its environment."""

from pydantic import Field, field_validator

from shared.model.cost import load_coefficients
from shared.runtime.settings import ServiceSettings


class CacheManagerSettings(ServiceSettings):
    """`VERTUMNUS_*`, see `ServiceSettings`. Everything that may change while it runs is a parameter of the pool."""

    coefficients: str = Field(
        default="qwen3_30b_a3b_h20",
        description="cost model that prices a missed block, a file in shared/model/coefficients",
    )

    @field_validator("coefficients")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            load_coefficients(name)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error
        return name
