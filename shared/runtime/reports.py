"""Ask agents what their workers hold. The answer comes by the log, for everybody: see `cache-reported`."""

import asyncio
from collections.abc import Collection, Mapping

import structlog
from pydantic import ValidationError

from shared.contracts.commands import Refused, Report, decode_reply, encode_message
from shared.contracts.ids import NodeId, WorkerId
from shared.contracts.subjects import Subjects
from shared.runtime.ports import Bus, NoReply, Unavailable

ASK_EVERY_S = 5.0
"""Between two requests for the same reports: one may be long, and it comes by the log."""

ANSWER_LIMIT_S = 2.0


async def ask_for_reports(bus: Bus, subjects: Subjects, workers: Mapping[NodeId, Collection[WorkerId]]) -> None:
    """Ask each node for full reports of these workers. Who does not answer is logged; ask again after `ASK_EVERY_S`."""
    logger = structlog.get_logger(component="reports")

    async def ask(node: NodeId, which: Collection[WorkerId]) -> None:
        command = encode_message(Report(workers=tuple(sorted(which))))
        try:
            reply = decode_reply(await bus.request(subjects.agent(node), command, ANSWER_LIMIT_S))
        except (NoReply, Unavailable, ValidationError) as error:
            logger.warning("no report", node=node, error=str(error))
            return
        if isinstance(reply, Refused):
            logger.warning("no report", node=node, reason=reply.reason, detail=reply.detail)

    await asyncio.gather(*(ask(node, which) for node, which in workers.items()))
