"""Waiting in tests, and a consumer that remembers."""

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], limit_s: float = 10) -> None:
    """Returns when `holds()` is true; TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


class Reading:
    """Keeps what a tail delivers."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, int, bytes]] = []

    def deliver(self, subject: str, seq: int, raw: bytes) -> None:
        self.messages.append((subject, seq, raw))

    async def reach(self, seq: int, limit_s: float = 10) -> list[tuple[str, int, bytes]]:
        """What was delivered, once that includes `seq`."""
        await until(lambda: self.messages and self.messages[-1][1] >= seq, limit_s)
        return self.messages
