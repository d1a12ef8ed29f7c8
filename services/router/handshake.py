"""The router's side of the hand-shake with an agent: give it an assignment, take one back, or tell it that one is no longer
wanted."""

from collections.abc import Mapping

import structlog
from pydantic import ValidationError

from services.router.calls import Call
from services.router.wiring import Placed, Wiring
from shared.contracts.commands import (
    Accepted,
    Assign,
    Cancel,
    RefusalReason,
    Refused,
    Release,
    Released,
    decode_reply,
    encode_message,
)
from shared.contracts.events import RedirectReason, RequestAssigned
from shared.contracts.ids import node_of
from shared.runtime.ports import NoReply, Unavailable

REDIRECT_REASON: Mapping[RefusalReason, RedirectReason] = {
    "draining": "draining",
    "stale-epoch": "stale-epoch",
    "unknown-worker": "unknown-worker",
    "full": "full",
    "not-idle": "full",
}
"""What a refusal is called in the record; any other is `aborted`."""

ABORT_REASON: Mapping[str, RedirectReason] = {
    "claim-lost": "claim-lost",
    "draining": "draining",
    "engine-died": "node-lost",
    "out-of-blocks": "full",
}
"""What it is called that the agent broke off, by the log or by a frame; any other `AbortReason` is `aborted`."""


async def give(wiring: Wiring, call: Call, placed: Placed, *, rebalanced: bool = False) -> RedirectReason | None:
    """None when the agent has taken the assignment, else why it has not; "no-reply" if that is not known. Repeating it is
    safe. A `rebalanced` one is for an idle worker only."""
    assigned = placed.assigned
    command = Assign(
        request=call.request,
        attempt=assigned.attempt,
        router=wiring.router,
        router_source=wiring.source,
        worker=assigned.worker,
        decode_worker=assigned.decode_worker,
        prompt_tokens=call.order.prompt_tokens + len(call.generated),
        block_ids=b"".join(call.order.chain),
        max_new_tokens=call.tokens_left,
        stop_tokens=call.order.stop_tokens,
        sampling=call.sampling,
        service_us=assigned.service_us,
        ratio=assigned.ratio,
        fetch_from=assigned.fetch_from,
        fetch_blocks=assigned.fetch_blocks,
        rebalanced=rebalanced,
        generated_tokens=len(call.generated),
        decision=placed.event.id,
        traceparent=call.order.traceparent,
    )
    logger = structlog.get_logger(component="handshake").bind(request=call.request, worker=assigned.worker)
    subject = wiring.subjects.agent(node_of(assigned.worker))
    try:
        reply = decode_reply(await wiring.bus.request(subject, encode_message(command), wiring.settings.ack_timeout_s))
    except NoReply as error:
        logger.info("no reply", error=str(error))
        return "no-reply"
    except ValidationError as error:
        logger.warning("unreadable reply", errors=error.error_count())
        return "no-reply"
    match reply:
        case Accepted():
            return None
        case Refused():
            logger.info("refused", reason=reply.reason, detail=reply.detail)
            return REDIRECT_REASON.get(reply.reason, "aborted")
        case _:
            logger.warning("an answer to something else", kind=reply.kind)
            return "no-reply"


async def take_back(wiring: Wiring, assigned: RequestAssigned) -> bool:
    """Whether the agent has given a queued request back. If not, it has started or ended there, or the log will tell."""
    logger = structlog.get_logger(component="handshake").bind(request=assigned.request, worker=assigned.worker)
    command = Release(request=assigned.request, attempt=assigned.attempt)
    subject = wiring.subjects.agent(node_of(assigned.worker))
    try:
        reply = decode_reply(await wiring.bus.request(subject, encode_message(command), wiring.settings.ack_timeout_s))
    except (NoReply, ValidationError) as error:
        logger.info("not given back", error=type(error).__name__)
        return False
    return isinstance(reply, Released) and reply.outcome == "released"


async def give_up(wiring: Wiring, assigned: RequestAssigned) -> None:
    """Tell the agent, once, that nobody waits for this attempt. If it is lost, it costs work and nothing else."""
    command = Cancel(request=assigned.request, attempt=assigned.attempt)
    try:
        await wiring.bus.publish(wiring.subjects.agent(node_of(assigned.worker)), encode_message(command))
    except Unavailable as error:
        structlog.get_logger(component="handshake").info("not sent", request=assigned.request, error=str(error))
