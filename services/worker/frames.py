"""Generated tokens on their way to the router that owns the request."""

import structlog

from shared.contracts.commands import Assign, TokenFrame, encode_message
from shared.contracts.events import AbortReason
from shared.contracts.subjects import Subjects
from shared.runtime.clock import Clock
from shared.runtime.ports import Bus, Unavailable

RETRY_S = 0.2
RETRIES_MAX = 50
"""Ten seconds: a NATS server that restarts is back by then, and a router gives up on a silent stream."""


class Frames:
    """Publishes on the connection for bulk, so that commands and heartbeats never wait behind tokens."""

    def __init__(self, bus: Bus, subjects: Subjects, clock: Clock) -> None:
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._logger = structlog.get_logger(component="frames")

    async def send(self, assign: Assign, frame: TokenFrame) -> None:
        """Waits while the connection is away and its buffer full. Errors: Unavailable after ten seconds of that."""
        subject = self._subjects.frames(assign.router, assign.request)
        payload = encode_message(frame)
        for _ in range(RETRIES_MAX):
            try:
                return await self._bus.publish(subject, payload)
            except Unavailable:
                await self._clock.sleep(RETRY_S)
        return await self._bus.publish(subject, payload)

    async def broke_off(self, assign: Assign, reason: AbortReason, index: int = 0) -> None:
        """Tell the router what it would otherwise learn from the log, or from silence, as one that is not reached does."""
        try:
            await self.send(
                assign, TokenFrame(request=assign.request, attempt=assign.attempt, index=index, error=reason)
            )
        except Unavailable as error:
            self._logger.warning("router not told", request=assign.request, reason=reason, error=str(error))
