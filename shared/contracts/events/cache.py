"""What workers hold. A worker's own index is the authority; the global trie is the projection of these events."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.envelope import Channel, EventData, event
from shared.contracts.ids import PackedBlockIds, RequestId, WorkerId


class BlockRun(BaseModel):
    """Consecutive blocks of one path: they start below `parent` (None for the root), ids packed, 16 bytes each."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_bytes="base64", val_json_bytes="base64")

    parent: bytes | None = None
    block_ids: PackedBlockIds


@event("blocks-stored", channel=Channel.CACHE, senders=("worker",))
class BlocksStored(EventData):
    """Blocks became resident at a worker. `number` is gap-free per (worker, incarnation), from 1, over both kinds of event.

    A prefill names its request and the depths `first_depth … first_depth + blocks - 1` of that request's chain; every other
    cause carries `runs`. The block at depth i lies on rank first_rank + i mod degree (cyclic layout) or on all (replicated).
    """

    worker: WorkerId
    incarnation: int
    number: int = Field(ge=1)
    cause: Literal["prefill", "fetch", "replication", "reconciliation"]
    request: RequestId | None = None
    first_depth: int = Field(default=0, ge=0)
    blocks: int = Field(ge=1)
    runs: tuple[BlockRun, ...] = ()


@event("blocks-evicted", channel=Channel.CACHE, senders=("worker",))
class BlocksEvicted(EventData):
    """Blocks left a worker, children before parents; ids packed, 16 bytes each."""

    worker: WorkerId
    incarnation: int
    number: int = Field(ge=1)
    cause: Literal["pressure", "reclaim", "switch"]
    block_ids: PackedBlockIds


@event("cache-reported", channel=Channel.CACHE, senders=("worker",))
class CacheReported(EventData):
    """Everything a worker holds, parents before children: replaces what was known of it. `number` is the last one it covers.

    A report that exceeds one event comes in `parts`; it counts when the last part is folded.
    """

    worker: WorkerId
    incarnation: int
    number: int
    part: int = Field(ge=1)
    parts: int = Field(ge=1)
    runs: tuple[BlockRun, ...] = ()
