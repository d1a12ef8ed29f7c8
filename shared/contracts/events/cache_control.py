"""The cache manager's decisions, all on one fenced subject. z is the trie node whose path is replicated or reclaimed."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.envelope import Channel, EventData, event
from shared.contracts.events.cache import BlockRun
from shared.contracts.geometry import Degree
from shared.contracts.ids import NodeId, WorkerId

PATH_BLOCKS_MAX = 1 << 32
"""More than any prompt has: who folds an operation walks up as many."""


@event("cache-leadership-taken", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class CacheLeadershipTaken(EventData):
    """From here on appends of cache managers with an older term fail. The leader has folded `kept_events` events that the
    log had dropped, and the log from `first_seq` on. Its cost model is empty if it does not say."""

    leader: str
    term: int = Field(ge=1)
    first_seq: int = Field(default=1, ge=1)
    kept_events: int = Field(default=0, ge=0)
    coefficients: dict[str, float | str] = Field(default_factory=dict)


class ReconciledWorker(BaseModel):
    """What one new worker starts with: blocks it can use at once, and blocks that are still on ranks it does not have."""

    model_config = ConfigDict(frozen=True, extra="allow")

    worker: WorkerId
    retained: tuple[BlockRun, ...] = ()
    pending: tuple[BlockRun, ...] = ()


@event("placement-reconciled", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class PlacementReconciled(EventData):
    """The prefix metadata of a node's coming epoch."""

    node: NodeId
    epoch: int
    workers: tuple[ReconciledWorker, ...]


@event("replication-requested", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class ReplicationRequested(EventData):
    """Copy the missing part of the path root → z to a worker of degree `degree` (paper, section 4.4). `way` says how its engine
    will come by it: by reading the blocks, or by computing them anew."""

    operation: str
    z: bytes
    degree: Degree
    kind: Literal["inter", "intra"]
    sources: tuple[WorkerId, ...]
    destination: WorkerId
    first_depth: int = Field(ge=0)
    blocks: int = Field(ge=1, le=PATH_BLOCKS_MAX)
    score: float
    way: Literal["read", "computed"] = "read"


@event("replica-installed", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class ReplicaInstalled(EventData):
    """The destination reported every block: from here on the router may count on them."""

    operation: str
    z: bytes
    destination: WorkerId
    blocks: int
    copy_us: int


@event("replication-failed", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class ReplicationFailed(EventData):
    """Nothing was installed; the destination's space is free again."""

    operation: str
    z: bytes
    destination: WorkerId
    reason: str


@event("reclamation-requested", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class ReclamationRequested(EventData):
    """Remove the replica of z at one worker: not in use, no retained descendants there."""

    operation: str
    z: bytes
    worker: WorkerId
    blocks: int = Field(ge=1, le=PATH_BLOCKS_MAX)
    score: float


@event("replica-reclaimed", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class ReplicaReclaimed(EventData):
    """The worker reported the blocks gone."""

    operation: str
    z: bytes
    worker: WorkerId
    blocks: int


@event("reclamation-failed", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class ReclamationFailed(EventData):
    """The replica stays."""

    operation: str
    z: bytes
    worker: WorkerId
    reason: str


@event("cache-scan-completed", channel=Channel.CACHE_CONTROL, senders=("cachemgr",))
class CacheScanCompleted(EventData):
    """One pass of Algorithm 2: how many candidates each list had and what was chosen, plus the size of the trie. `rules` is the
    version by which: 1 gave up only what nobody at all held anything below, and copied from any engine; 2 could be kept from
    what could be done by what could not. `passed` nodes at the head of a line it looked at in vain: they go to its end."""

    scan: int = Field(ge=1)
    to_seq: int
    nodes: int
    holders: int
    inter_candidates: int
    intra_candidates: int
    reclaim_candidates: int
    chosen: tuple[str, ...] = ()
    rules: int = 1
    passed: int = Field(default=0, ge=0)
