"""The life of a request, as its router tells it. No text and no token is in any of these: block ids are keyed hashes."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.envelope import Channel, EventData, event
from shared.contracts.geometry import Degree
from shared.contracts.ids import PackedBlockIds, RequestId, RouterId, TenantId, WorkerId

Trust = Literal["exact", "degraded", "blind"]
"""How far a worker's projected cache is believed: all of it, only what was confirmed since a gap, nothing."""

Exclusion = Literal[
    "not-schedulable",
    "draining",
    "stale-epoch",
    "too-long",
    "full",
    "hung",
    "cordoned",
    "slo",
    "share",
    "refused",
    "silent",
]

RedirectReason = Literal[
    "draining", "stale-epoch", "unknown-worker", "full", "no-reply", "node-lost", "rebalanced", "claim-lost", "aborted"
]

RejectReason = Literal["too-long", "overloaded", "slo", "rate-limited", "no-worker"]

LimitName = Literal["requests", "tokens-per-minute", "queued-tokens", "share-us", "ttft-us", "held-us"]
"""Open requests; prompt tokens assigned in a minute; prompt tokens of requests without a prefill; predicted work on workers;
predicted time to first token; time waited at the router."""

Finish = Literal["stop", "length"]
"""How a whole answer ended: at a stop token or string, or at its limit of tokens."""


@event("router-registered", channel=Channel.REQUESTS, senders=("router",))
class RouterRegistered(EventData):
    """A router process serves. Its `source` is new with every start.

    What its decisions began with: the log's first event then, how many kept events it folded before that, how far it had
    folded, and its cost model, which is empty if it does not say.
    """

    router: RouterId
    first_seq: int = Field(default=1, ge=1)
    kept_events: int = Field(default=0, ge=0)
    seen_seq: int = Field(default=0, ge=0)
    coefficients: dict[str, float | str] = Field(default_factory=dict)


@event("request-received", channel=Channel.REQUESTS, senders=("router",))
class RequestReceived(EventData):
    """A request passed authentication and size checks.

    Its block chain is `known_blocks` blocks that end at `known_block` (a block every reader of the log knows at `seen_seq`)
    and then the ids in `block_ids`, 16 bytes each, in order. `known_blocks` 0 means the whole chain is in `block_ids`.
    `client_digest` finds a request by the id its client gave it (`x-request-id`), which is not itself recorded.
    `placed_only` says that another gateway asked where it should go, forwards it there itself, and reports its end.
    A `hard_slo` is refused rather than missed; of one tenant's requests that wait, those of the highest `priority` go first.
    """

    request: RequestId
    tenant: TenantId
    model: str
    prompt_tokens: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    slo_us: int = Field(ge=0)
    hard_slo: bool = False
    priority: int = 0
    stream: bool
    client_digest: str | None = None
    placed_only: bool = False
    known_blocks: int = 0
    known_block: bytes | None = None
    block_ids: PackedBlockIds = b""
    seen_seq: int


@event("requests-refused", channel=Channel.REQUESTS, senders=("router",))
class RequestsRefused(EventData):
    """How many requests were refused before they were received, in one second, for one tenant and reason."""

    tenant: TenantId
    reason: str
    count: int = Field(ge=1)


class PricedCandidate(BaseModel):
    """One worker's price, part by part: price = queue + delay + β·service + occupancy (all microseconds); of a decision
    with `ratio_in_own_time` it is queue + delay + service + (β - 1)·(service without the ratio) + occupancy.

    Of the `cached_tokens`, `in_flight_tokens` are being computed there for other requests and `fetched_tokens` lie at
    `fetch_from` and are read first, which takes `fetch_us` of the service. `queue_us` is the work ahead of the request;
    `delayed_jobs` are served after it, `delay_us` in all. `ratio` is the worker's measured over predicted time, a part of the
    service. Under `paper` nothing is in flight, fetched or delayed, and all that waits is ahead.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    worker: WorkerId
    degree: Degree
    cached_tokens: int
    queue_us: int
    service_us: int
    occupancy_us: int
    price_us: int
    trust: Trust = "exact"
    in_flight_tokens: int = 0
    fetched_tokens: int = 0
    fetch_us: int = 0
    fetch_from: WorkerId | None = None
    delayed_jobs: int = 0
    delay_us: int = 0
    ratio: float = 1.0


@event("request-assigned", channel=Channel.REQUESTS, senders=("router",))
class RequestAssigned(EventData):
    """Where a request goes, and every input of that decision.

    `candidates` holds the winner first, then the best of each degree and the next four by price; `price_digest` covers all
    of them, by version 1 as text and by version 2 as the workers' names, a line each, and 64 bits for each price. `load` is the
    predicted work assigned per worker-second of the last ten seconds, `ratio` the winner's. Under `ratio_in_own_time` occupancy
    and the (β - 1) in β were reckoned without ratios. The first `fetch_blocks` blocks of the chain are to be read from
    `fetch_from`, as far as the worker does not hold them.
    The state decided on is the log folded to `seen_seq` plus the source's own events before this one.
    """

    request: RequestId
    attempt: int = Field(ge=1)
    worker: WorkerId
    degree: Degree
    decode_worker: WorkerId | None = None
    policy: str
    uncached_tokens: int
    cached_tokens: int
    service_us: int
    queue_us: int
    beta: float
    lam: float
    load: float = 0.0
    ratio: float = 1.0
    ratio_in_own_time: bool = False
    preferred_degree: Degree
    candidates: tuple[PricedCandidate, ...]
    excluded: dict[Exclusion, int] = Field(default_factory=dict)
    price_digest: str
    digest_version: int = 1
    fetch_from: WorkerId | None = None
    fetch_blocks: int = 0
    parameters_version: int
    coefficients_version: str
    seen_seq: int
    now_ns: int


@event("request-redirected", channel=Channel.REQUESTS, senders=("router",))
class RequestRedirected(EventData):
    """Attempt `attempt` at `worker` goes no further; its reservation is free. The next assignment says where to: for the
    prompt, and behind a first token for the prompt and what was generated.

    `node_silent`: the agent of the worker's node did not answer, so that no worker of that node is asked again while somebody
    else can have the request, until the node registers anew.
    """

    request: RequestId
    attempt: int
    worker: WorkerId
    reason: RedirectReason
    node_silent: bool = False


@event("request-held", channel=Channel.REQUESTS, senders=("router",))
class RequestHeld(EventData):
    """The request waits at its router: its tenant has its share of the workers. It goes on with `request-assigned`, or ends.

    `outstanding_us` is the predicted work of the tenant that workers have from all routers, of `share_us` that it may have
    there; the request would add `service_us` and compute `uncached_tokens`. `ahead` of the tenant's wait at routers already.
    """

    request: RequestId
    tenant: TenantId
    priority: int = 0
    outstanding_us: int
    share_us: int
    service_us: int
    uncached_tokens: int
    hard_slo_us: int | None = None
    ahead: int
    parameters_version: int
    seen_seq: int
    now_ns: int


class LimitMet(BaseModel):
    """A limit that a request met: of `allowed`, `used` were taken and the request would have `added` its own. `scope` is the
    tenant's name, or the pool's; units follow from `name`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: LimitName
    scope: str
    allowed: int
    used: int
    added: int


@event("request-rejected", channel=Channel.REQUESTS, senders=("router",))
class RequestRejected(EventData):
    """The request ended without having been served, by decision. `limit` says which limit it met, if that was the reason."""

    request: RequestId
    reason: RejectReason
    retry_after_s: int | None = None
    limit: LimitMet | None = None
    parameters_version: int | None = None
    seen_seq: int | None = None
    now_ns: int | None = None


@event("request-completed", channel=Channel.REQUESTS, senders=("router",))
class RequestCompleted(EventData):
    """The request ended well. TTFT = held + queue + fetch + prefill + hand-off, measured at the router from arrival;
    `held_us` was waited at the router, `handoff_us` is what is left of it after the parts the agent measured. `tpot_us` is the
    mean time per token after the first."""

    request: RequestId
    worker: WorkerId
    ttft_us: int
    queue_us: int
    fetch_us: int = 0
    prefill_us: int
    handoff_us: int
    tpot_us: int
    output_tokens: int
    cached_tokens: int
    finish: Finish
    held_us: int = 0


@event("request-failed", channel=Channel.REQUESTS, senders=("router",))
class RequestFailed(EventData):
    """The request ended with an error that is ours; `unreported`: whoever asked where to send it never said how it went."""

    request: RequestId
    reason: Literal["attempts-exhausted", "no-worker", "engine", "lost-stream", "shutdown", "internal", "unreported"]


@event("request-cancelled", channel=Channel.REQUESTS, senders=("router",))
class RequestCancelled(EventData):
    """The client left."""

    request: RequestId
    reason: Literal["client-left"] = "client-left"


@event("router-lost", channel=Channel.CONTROL, senders=("controller",))
class RouterLost(EventData):
    """A router is gone; every request that its `source` has open ends here, in every fold."""

    router: RouterId
    source: str


ENDS = (RequestCompleted, RequestFailed, RequestCancelled, RequestRejected)
"""Every received request has exactly one of these, or its router's `router-lost`."""
