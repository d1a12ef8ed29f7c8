"""What commands, answers and heartbeats are made of: everything that travels unlogged."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.geometry import RANKS_MAX
from shared.contracts.ids import WorkerId

TEXT_CHARS_MAX = 256

Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Most of these end up in an event, and no event takes more than 64 bits."""

Attempt = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Text = Annotated[str, Field(max_length=TEXT_CHARS_MAX)]
SomeWorkers = Annotated[tuple[WorkerId, ...], Field(max_length=RANKS_MAX)]
"""Of one node, which has no more workers than ranks: each named one may cost a full report."""


class Message(BaseModel):
    """Base of everything that travels unlogged. Unknown fields are ignored: services of two versions may talk."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64")
