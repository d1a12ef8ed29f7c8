"""What a node agent says of its node, its prefills and its geometry."""

from typing import Literal

from pydantic import Field

from shared.contracts.envelope import Channel, EventData, event
from shared.contracts.geometry import Degree, MaybeComposition, Rank, RankCount
from shared.contracts.ids import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, NodeId, RequestId, WorkerId

AbortReason = Literal[
    "claim-lost", "cancelled", "released", "engine-died", "out-of-blocks", "draining", "router-lost", "engine"
]


@event("node-registered", channel=Channel.WORKERS, senders=("worker",))
class NodeRegistered(EventData):
    """A node is up under a new incarnation, with empty caches.

    `epoch` and `composition` are what it booted: its last committed composition, or epoch 0 and none. `chunk_tokens` is what
    a step computes at most of one prompt, None if prompts are not cut; `fetches` says that an assignment may name blocks to
    be read from another worker. `decode_sequences` is how many requests a decode rank takes at a time, 0 if it takes none that
    another node has prefilled; `hands_off` that a prefill of this node may go on at another's decode rank. `evicts` says that
    single prefixes can be taken out of its caches. Nobody changes the node to workers below `degree_min`: their KV memory,
    which is what the model's weights have left, would not hold what one step computes of a prompt.
    """

    node: NodeId
    incarnation: int = Field(ge=1)
    engine: Literal["torch", "sglang", "modelled"]
    model: str
    model_revision: str
    tokenizer_revision: str
    dtype: str
    kv_layout: Literal["cyclic", "replicated"]
    block_tokens: int = Field(ge=BLOCK_TOKENS_MIN, le=BLOCK_TOKENS_MAX)
    kv_bytes_per_token: int = Field(ge=1)
    prefill_ranks: RankCount
    decode_ranks: RankCount
    degrees: tuple[int, ...]
    blocks_per_rank: int = Field(ge=1)
    prompt_tokens_max: int = Field(ge=1)
    coefficients_version: str
    epoch: int = 0
    composition: MaybeComposition = ()
    chunk_tokens: int | None = Field(default=None, ge=1)
    fetches: bool = False
    decode_sequences: int = Field(default=0, ge=0)
    hands_off: bool = False
    evicts: bool = True
    degree_min: Degree = 1


@event("node-lost", channel=Channel.WORKERS, senders=("worker",))
class NodeLost(EventData):
    """An incarnation of a node ended: said by its own agent (ranks died, shutdown)."""

    node: NodeId
    incarnation: int
    reason: str


@event("node-declared-lost", channel=Channel.CONTROL, senders=("controller",))
class NodeDeclaredLost(EventData):
    """An incarnation of a node ended: its agent is silent, says the controller."""

    node: NodeId
    incarnation: int
    silent_us: int


@event("prefill-started", channel=Channel.WORKERS, senders=("worker",))
class PrefillStarted(EventData):
    """A request left the worker's queue and its step began."""

    request: RequestId
    attempt: int
    worker: WorkerId
    queue_us: int


@event("prefill-completed", channel=Channel.WORKERS, senders=("worker",))
class PrefillCompleted(EventData):
    """Measured R, P by source, and seconds. computed + cached_own + cached_in_flight + cached_fetched = prompt tokens.

    `prefill_us` is the time of the request's `steps`. A step that several requests share counts for each by its part of the
    step's prediction, so `prefill_us` over `predicted_us` (by the node's registered coefficients; None if the agent did not
    say) is measured over predicted whatever else ran. `queue_us` is all the rest of the time from acceptance to first token.
    `cached_fetched_tokens` were read from `fetched_from`, for which the request waited `fetch_us`. `fetch_fallback` says why a
    fetch brought less than it was to: `here` (nothing was missing any more), `dearer` (than to compute it), `silent`
    (the source, of late), `computes` (this engine reads no KV), or what a copy or its refusal says.
    """

    request: RequestId
    attempt: int
    worker: WorkerId
    node_epoch: int
    computed_tokens: int
    cached_own_tokens: int
    cached_in_flight_tokens: int = 0
    cached_fetched_tokens: int = 0
    queue_us: int
    fetch_us: int = 0
    prefill_us: int
    predicted_us: int | None = None
    steps: int = 1
    fetch_fallback: str | None = None
    fetched_from: WorkerId | None = None


@event("prefill-aborted", channel=Channel.WORKERS, senders=("worker",))
class PrefillAborted(EventData):
    """An accepted assignment ended without a first token."""

    request: RequestId
    attempt: int
    worker: WorkerId
    reason: AbortReason


@event("kv-handed-off", channel=Channel.WORKERS, senders=("worker",))
class KvHandedOff(EventData):
    """The prompt's KV is with the decode worker; the prefill's pins have ended."""

    request: RequestId
    attempt: int
    worker: WorkerId
    decode_worker: WorkerId
    bytes: int
    handoff_us: int


@event("drain-completed", channel=Channel.WORKERS, senders=("worker",))
class DrainCompleted(EventData):
    """No step runs and nothing is queued on these workers."""

    node: NodeId
    node_epoch: int
    workers: tuple[WorkerId, ...]
    returned_requests: int
    drain_us: int


@event("rank-adopted-epoch", channel=Channel.WORKERS, senders=("worker",))
class RankAdoptedEpoch(EventData):
    """One rank serves the geometry of a new epoch; `switch_us` from the barrier to ready. Epoch 0 is none: the node shuts
    down, and finishes what it has."""

    node: NodeId
    incarnation: int
    rank: Rank
    epoch: int
    switch_us: int


NODE_ENDS = (NodeLost, NodeDeclaredLost)
