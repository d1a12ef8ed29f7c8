"""Read request bodies in bounded memory and time: each by itself, and all that are being read or parsed together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from services.router.openai import BadRequest

READ_S_MAX = 30.0
"""A client that takes longer to send its body is cut off, or slow ones could hold every place."""

TOGETHER_BODIES = 32
"""All bodies together may take as much as this many of the largest."""


class Bodies:
    """`body_bytes_max` bounds one body."""

    def __init__(self, body_bytes_max: int) -> None:
        self.held_bytes = 0
        self._body_bytes_max = body_bytes_max

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body; its memory counts until the block ends. Errors: BadRequest (413, 408, 429)."""
        body = bytearray()
        try:
            self._check_length(request)
            try:
                async with asyncio.timeout(READ_S_MAX):
                    async for chunk in request.stream():
                        self._check_room(len(body) + len(chunk), len(chunk))
                        body += chunk
                        self.held_bytes += len(chunk)
            except TimeoutError:
                raise BadRequest(
                    f"the body took over {READ_S_MAX:g} s to arrive", code="request_timeout", status=408
                ) from None
            yield bytes(body)
        finally:
            self.held_bytes -= len(body)

    def _check_length(self, request: Request) -> None:
        """Refuse by the announced length, before a byte is read. A wrong announcement is found while reading."""
        announced = request.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit():
            self._check_room(int(announced), 0)

    def _check_room(self, size: int, more: int) -> None:
        if size > self._body_bytes_max:
            raise BadRequest(
                f"the body has over {self._body_bytes_max} bytes, which is the limit",
                code="request_too_large",
                status=413,
            )
        if self.held_bytes + more > TOGETHER_BODIES * self._body_bytes_max:
            raise BadRequest("too many large requests at once", code="rate_limit_exceeded", status=429)
