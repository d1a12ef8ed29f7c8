"""Unlogged messages over core NATS."""

import asyncio

import nats.errors
import structlog
from nats.aio.msg import Msg

from shared.runtime.nats_link import NatsLink, cancellable
from shared.runtime.ports import HANDLERS_MAX, Handler, NoReply, Unavailable

WAITING_MESSAGES_MAX = 10_000
WAITING_BYTES_MAX = 64 * 2**20
"""Per subscription, behind the handlers at work; what comes beyond that is dropped, and the drop is logged."""


class NatsBus:
    """A `Bus`. `close` it before its link."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._running: set[asyncio.Task[None]] = set()
        self._logger = structlog.get_logger(component="bus")

    async def publish(self, subject: str, payload: bytes) -> None:
        try:
            with cancellable():
                await self._link.client.publish(subject, payload)
        except nats.errors.MaxPayloadError:
            raise self._too_large(subject, payload) from None
        except nats.errors.Error as error:
            raise Unavailable(f"publish on {subject}: {error}") from error

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        try:
            with cancellable():
                return await self._ask(subject, payload, timeout_s)
        except nats.errors.NoRespondersError:
            raise NoReply(f"nobody listens on {subject}") from None
        except TimeoutError:
            raise NoReply(f"no answer on {subject} within {timeout_s:g} s") from None
        except nats.errors.MaxPayloadError:
            raise self._too_large(subject, payload) from None
        except nats.errors.Error as error:
            raise NoReply(f"no answer on {subject}: {error}") from error

    async def _ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            # Not into the client's buffer: a command must not arrive long after its sender has given it up.
            await self._link.connected()
            return (await self._link.client.request(subject, payload, timeout=timeout_s)).data

    async def subscribe(self, subject: str, handler: Handler) -> None:
        slots = asyncio.Semaphore(HANDLERS_MAX)

        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            slots.release()

        async def take(message: Msg) -> None:
            await slots.acquire()
            task = asyncio.create_task(self._handle(handler, message))
            self._running.add(task)
            task.add_done_callback(ended)

        try:
            with cancellable():
                await self._link.client.subscribe(
                    subject, cb=take, pending_msgs_limit=WAITING_MESSAGES_MAX, pending_bytes_limit=WAITING_BYTES_MAX
                )
                # nats-py writes a ping ahead of what waits to be written: the first answer may precede the subscription.
                for _ in range(2):
                    await self._link.client.flush()
        except nats.errors.Error as error:
            raise Unavailable(f"subscribe to {subject}: {error}") from error

    async def close(self) -> None:
        """Cancel the handlers at work."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _handle(self, handler: Handler, message: Msg) -> None:
        try:
            answer = await handler(message.subject, message.data)
            if answer is not None and message.reply:
                await self.publish(message.reply, answer)
        except Unavailable as error:
            self._logger.warning("answer not sent", subject=message.subject, error=str(error))
        except Exception:
            self._logger.exception("handler failed", subject=message.subject)

    def _too_large(self, subject: str, payload: bytes) -> ValueError:
        limit = self._link.client.max_payload
        return ValueError(f"message on {subject}: {len(payload)} bytes; the server takes at most {limit}")
