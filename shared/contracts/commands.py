"""What services ask of node agents over core NATS, and what they answer. Never stored: events say what came of it.

A command is JSON with a `kind`; every one names what it must not be confused with (attempt, epoch, term) so that a late or
repeated copy does no harm. Tokens travel as the claim check's u32 little-endian frames, generated tokens as `TokenFrame`.
"""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field, TypeAdapter, ValidationError

from shared.contracts.copy_commands import (
    HAND_OFF_BLOCKS_MAX,
    Copied,
    Copy,
    Evict,
    Evicted,
    Pin,
    Pinned,
    PinnedSlot,
    Unpin,
)
from shared.contracts.events import Finish
from shared.contracts.ids import NodeId, RequestId, RouterId, Source, WorkerId
from shared.contracts.message import Attempt, Message, Number, SomeWorkers, Text, TokenId

TOKEN_BYTES = 4
"""A token in a claim reply: u32, little-endian."""

CLAIM_FRAME_BYTES = 256 * 1024
"""The largest piece of a prompt in one claim reply: 65,536 tokens."""

STOP_TOKENS_MAX = 256

TAKE_OVER_LEASE_S = 10.0
"""Of a request that a node decodes for another, which renews it every second: whoever is silent for this long is gone, or was
told by its router to stop and could not say so."""


class SamplingSpec(Message):
    """The sampling fields that reach an engine. `top_k` 0 and `min_p` 0 leave out nothing."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    logprobs: int = Field(default=0, ge=0, le=20)
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0, le=1)


class Assign(Message):
    """Queue this request. Idempotent by (request, attempt). Answers Accepted or Refused. `decision` is the id of the
    `request-assigned` behind it: what comes of it names that as its cause.

    Of the first `fetch_blocks` blocks, those that the worker does not hold are read from `fetch_from` before the prefill; what
    cannot be had is computed. A `rebalanced` request left another queue for an idle worker, and is refused by any other."""

    kind: Literal["assign"] = "assign"
    request: RequestId
    attempt: Attempt
    router: RouterId
    router_source: Source
    worker: WorkerId
    decode_worker: WorkerId | None = None
    prompt_tokens: Number
    block_ids: bytes
    max_new_tokens: Number
    stop_tokens: Annotated[tuple[TokenId, ...], Field(max_length=STOP_TOKENS_MAX)] = ()
    sampling: SamplingSpec
    service_us: Number
    decision: UUID | None = None
    traceparent: Text | None = None
    fetch_from: WorkerId | None = None
    fetch_blocks: Number = 0
    rebalanced: bool = False


class Release(Message):
    """Give a queued request back. Answers Released: it left the queue, had started, or is not known."""

    kind: Literal["release"] = "release"
    request: RequestId
    attempt: Attempt


class Cancel(Message):
    """Nobody waits for this attempt any more, nor for those before it: the client left or has enough, or the router has given
    it up. Queued: forget it; running: stop at the next step boundary; streaming: stop; still to come: refuse it."""

    kind: Literal["cancel"] = "cancel"
    request: RequestId
    attempt: Attempt


class Drain(Message):
    """Refuse new work on these workers, return what is queued, finish what runs. Answers when the order is taken."""

    kind: Literal["drain"] = "drain"
    term: Number
    epoch: Number
    workers: SomeWorkers
    deadline_us: Number


class Adopt(Message):
    """Serve this composition under this epoch. Answers Accepted when every rank has adopted, or Refused."""

    kind: Literal["adopt"] = "adopt"
    term: Number
    node: NodeId
    incarnation: Number
    epoch: Number
    composition: tuple[int, ...]


class TakeOver(Message):
    """Go on with a request that `sender` has prefilled: read its KV, which lies in `slots`, block by block to the partial last
    one, and decode it as `assign` says, from the second token on, straight to the router. Idempotent by (request, attempt).
    Answers TakenOver when the KV is here or a second has passed, or Refused. Who sent it repeats `renew`: what nobody has asked
    for in `TAKE_OVER_LEASE_S` ends."""

    kind: Literal["take-over"] = "take-over"
    sender: NodeId
    assign: Assign
    first_token: TokenId
    slots: Annotated[tuple[PinnedSlot, ...], Field(min_length=1, max_length=HAND_OFF_BLOCKS_MAX)]
    access: bytes


class Renew(Message):
    """The request that was taken over is still wanted. Answers as `take-over`; Refused if it is not known."""

    kind: Literal["renew"] = "renew"
    request: RequestId
    attempt: Attempt


class Report(Message):
    """Publish `cache-reported` for these workers, or for all."""

    kind: Literal["report"] = "report"
    workers: SomeWorkers = ()


Command = Annotated[
    Assign | Release | Cancel | Drain | Adopt | Copy | Evict | Pin | Unpin | TakeOver | Renew | Report,
    Field(discriminator="kind"),
]
_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)

RefusalReason = Literal[
    "draining",
    "stale-epoch",
    "stale-term",
    "unknown-worker",
    "full",
    "not-idle",
    "busy",
    "bad-command",
    "engine",
    "unsupported",
]


class Accepted(Message):
    """The command is taken; for `adopt`, done."""

    kind: Literal["accepted"] = "accepted"


class Refused(Message):
    """Nothing was done."""

    kind: Literal["refused"] = "refused"
    reason: RefusalReason
    detail: str = ""


class Released(Message):
    """What became of a `release`."""

    kind: Literal["released"] = "released"
    outcome: Literal["released", "started", "unknown"]


class TakenOver(Message):
    """How far a `take-over` has come. From `decoding` on the KV is here, and its source is needed no longer; `bytes` and
    `handoff_us` say what that took."""

    kind: Literal["taken-over"] = "taken-over"
    stage: Literal["waiting", "decoding", "ended"]
    bytes: Number = 0
    handoff_us: Number = 0


Reply = Annotated[Accepted | Refused | Released | Copied | Evicted | Pinned | TakenOver, Field(discriminator="kind")]
_REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)


class Claim(Message):
    """An agent asks a router for the prompt's tokens from `offset` on. The reply is raw u32 little-endian, at most
    `CLAIM_FRAME_BYTES`; an empty reply says that the router no longer has the request."""

    request: RequestId
    attempt: Attempt
    offset: Number


class TokenLogprobs(Message):
    """(token id, log-probability), the chosen token first."""

    alternatives: tuple[tuple[TokenId, float], ...] = ()


class TokenFrame(Message):
    """Generated tokens `index … index + len(tokens) - 1` of one attempt, from the worker that made them.

    The frame with index 0 holds the first token and the agent's measurements. The last frame has `finish`; an attempt that
    broke off says why in `error`, as an `AbortReason`. A router drops frames of an attempt that it has given up.
    """

    request: RequestId
    attempt: Attempt
    index: Number
    tokens: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: Number = 0
    queue_us: Number = 0
    fetch_us: Number = 0
    prefill_us: Number = 0
    finish: Finish | None = None
    error: Text | None = None


class NodeLoad(Message):
    """A node's heartbeat, 1/s. Never enters a price; it says the agent lives and shows operators its queues. `running` names
    the first request of each worker's step, `steps` all of them."""

    node: NodeId
    incarnation: Number
    epoch: Number
    queued: dict[WorkerId, Number]
    running: dict[WorkerId, RequestId]
    steps: dict[WorkerId, tuple[RequestId, ...]] = Field(default_factory=dict)
    used_blocks: Number
    free_blocks: Number


class RouterAlive(Message):
    """A router's heartbeat, 1/s. `source` is the process, `open_requests` what it would leave behind."""

    router: RouterId
    source: Source
    open_requests: Number


class BadCommand(ValueError):
    """The bytes are no command of ours; the message names the field."""


def decode_command(raw: bytes) -> Command:
    """BadCommand names the first wrong field."""
    try:
        return _COMMAND.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadCommand(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def decode_reply(raw: bytes) -> Reply:
    """ValidationError if the bytes are no reply."""
    return _REPLY.validate_json(raw)


def encode_message(message: Message) -> bytes:
    return message.model_dump_json(exclude_none=True).encode()
