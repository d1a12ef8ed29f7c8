"""What the controller reads from its environment."""

import json
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from shared.contracts.ids import NodeId, check_token
from shared.model.capacity import ProfiledName
from shared.model.lattice import Composition, parse_composition
from shared.runtime.settings import SecretFile, ServiceSettings


class ControllerSettings(ServiceSettings):
    """`VERTUMNUS_COMPOSITION=1,1,2,4`, `VERTUMNUS_COMPOSITIONS={"n1": "4,4"}`, …"""

    composition: Annotated[Composition, NoDecode] = Field(
        default=(1, 1, 2, 4), description="the first composition of a node that COMPOSITIONS does not name"
    )
    compositions: Annotated[dict[NodeId, Composition], NoDecode] = Field(
        default_factory=dict, description="first compositions by node, as JSON: for pools of unequal nodes"
    )
    coefficients: ProfiledName = Field(
        default="qwen3_30b_a3b_h20",
        description="the set whose profiled κ_C hold: a name, or the path of your own (.json); as the router is set",
    )
    capacity_share: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description=(
            "κ_C as a share of the window, for degrees that the set has no profiled one for: how much predicted work a "
            "worker carries within the SLO. 0.7 is a common utilisation limit of a queue, not a measurement"
        ),
    )
    operator_key_file: SecretFile | None = Field(
        default=None, description="operators must send this file's content as bearer token; without it nobody is asked"
    )

    @field_validator("composition", mode="before")
    @classmethod
    def _composition(cls, value: Any) -> Any:
        return parse_composition(value) if isinstance(value, str) else value

    @field_validator("compositions", mode="before")
    @classmethod
    def _compositions(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"no JSON: {error}") from None
        if not isinstance(value, dict):
            return value
        return {
            check_token("compositions", node): parse_composition(text) if isinstance(text, str) else text
            for node, text in value.items()
        }

    def operator_key(self) -> str | None:
        """What operators have to send, if anything."""
        return self.operator_key_file.read_text().strip() if self.operator_key_file else None
