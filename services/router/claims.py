"""The claim check: prompts wait here until the agents they were assigned to fetch them, in bounded memory.

Commands stay small and the log holds no tokens. An agent asks by (request, attempt, offset in tokens) and gets raw u32
little-endian, at most `CLAIM_FRAME_BYTES`; an empty answer says that this attempt is no longer wanted.
"""

import structlog
from pydantic import ValidationError

from shared.contracts.commands import CLAIM_FRAME_BYTES, TOKEN_BYTES, Claim
from shared.contracts.ids import RequestId, RouterId
from shared.contracts.subjects import Subjects
from shared.model.blocks import Tokens
from shared.runtime.ports import Bus


class BufferFull(Exception):
    """The prompts held leave no room for this one."""


class Claims:
    """`bytes_max` bounds what is held for all requests together."""

    def __init__(self, bus: Bus, subjects: Subjects, router: RouterId, bytes_max: int) -> None:
        self.held_bytes = 0
        self._bus = bus
        self._subject = subjects.claim(router)
        self._bytes_max = bytes_max
        self._held: dict[RequestId, tuple[int, bytes]] = {}
        self._logger = structlog.get_logger(component="claims")

    async def start(self) -> None:
        """Errors: Unavailable."""
        await self._bus.subscribe(self._subject, self._answer)

    def hold(self, request: RequestId, attempt: int, tokens: Tokens) -> None:
        """Serve `tokens` to this attempt and to no earlier one. Errors: BufferFull, and then nothing has changed."""
        raw = tokens.astype("<u4", copy=False).tobytes()
        _, before = self._held.get(request, (0, b""))
        if self.held_bytes - len(before) + len(raw) > self._bytes_max:
            raise BufferFull(f"{self.held_bytes} of {self._bytes_max} bytes of prompts are held")
        self.held_bytes += len(raw) - len(before)
        self._held[request] = attempt, raw

    def drop(self, request: RequestId) -> None:
        """The request has ended. Unknown ones are ignored."""
        _, raw = self._held.pop(request, (0, b""))
        self.held_bytes -= len(raw)

    async def _answer(self, subject: str, payload: bytes) -> bytes:
        try:
            claim = Claim.model_validate_json(payload)
        except ValidationError as error:
            self._logger.warning("unreadable claim", subject=subject, errors=error.error_count())
            return b""
        attempt, raw = self._held.get(claim.request, (0, b""))
        if attempt != claim.attempt:
            return b""
        start = claim.offset * TOKEN_BYTES
        return raw[start : start + CLAIM_FRAME_BYTES]
