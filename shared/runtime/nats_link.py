"""One connection to NATS: reconnects without end, but its first connect is bounded and says clearly what went wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client

from shared.runtime.ports import Unavailable

WHERE = "see VERTUMNUS_NATS_URL, VERTUMNUS_NATS_USER and VERTUMNUS_NATS_PASSWORD_FILE"
CONNECT_LIMIT_S = 10.0
RECONNECT_EVERY_S = 0.25
PING_EVERY_S = 5
PINGS_MAX = 2
"""A server that answers no ping for 10-15 s is left for the next one."""

ONE_LINE_PER_S = 1.0
"""An error of one kind is logged this often: a slow consumer has one for each message."""

DRAIN_LIMIT_S = 2
CLOSE_LIMIT_S = 3.0
BUFFER_BYTES_MAX = 8 * 2**20
"""What may wait in the client while the server is away."""


@contextmanager
def cancellable() -> Iterator[None]:
    """Around nats-py: raise the cancellation that it swallowed.

    Its `flush` catches CancelledError, and so does `wait_for` of Python 3.11 when the answer arrives at the same moment
    (python/cpython#86296). A task that is cancelled and goes on makes whoever awaits its end wait for ever.
    """
    task = asyncio.current_task()
    assert task is not None, "NATS is called from a task"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


class _Watcher(NamedTuple):
    disconnected: Callable[[], None]
    reconnected: Callable[[], None]


class NatsLink:
    """A connected client. `closed` returns once it has ended for good other than by `close`."""

    def __init__(self, addresses: str) -> None:
        self.client = Client()
        self.addresses = addresses
        self._watchers: list[_Watcher] = []
        self._calls: set[asyncio.Timeout] = set()
        self._quiet_until: dict[str, float] = {}
        self._connected = asyncio.Event()
        self._closed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._closing = False
        self._refused: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._last_error: Exception | None = None
        self._logger = structlog.get_logger(component="nats", server=addresses)

    def watch(self, disconnected: Callable[[], None], reconnected: Callable[[], None]) -> Callable[[], None]:
        """Call these whenever the connection breaks, before anything is read from the next one, and when that is there.

        Returns what ends it.
        """
        watcher = _Watcher(disconnected, reconnected)
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    @asynccontextmanager
    async def calling(self, what: str, limit_s: float) -> AsyncIterator[None]:
        """Around a question to the server: its errors become Unavailable, and so does a connection that breaks meanwhile.

        While the server is away nothing is asked: it would be buffered and arrive late.
        """
        if not self.client.is_connected:
            raise Unavailable(f"{what}: NATS at {self.addresses} is away")
        with cancellable():
            try:
                async with asyncio.timeout(limit_s) as limit:
                    self._calls.add(limit)
                    try:
                        yield
                    finally:
                        self._calls.discard(limit)
            except (nats.errors.Error, TimeoutError) as error:
                reason = str(error) or ("no answer" if self.client.is_connected else "the connection broke")
                raise Unavailable(f"{what}: {reason}") from error

    async def connected(self) -> None:
        """Returns when the server is there."""
        # The client knows that it is away a moment before it tells us.
        if not self.client.is_connected:
            self._connected.clear()
        await self._connected.wait()

    async def closed(self) -> Exception:
        return await asyncio.shield(self._closed)

    async def open(self, servers: list[str], name: str, user: str | None, password: str | None, limit_s: float) -> None:
        """Connect, once. Unavailable after `limit_s`, or at once if the server refuses us; other errors are worth a new try."""
        connecting = asyncio.ensure_future(
            self.client.connect(
                servers=servers,
                name=name,
                user=user,
                password=password,
                error_cb=self._error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._ended,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_EVERY_S,  # type: ignore[arg-type]  # it sleeps that long; a float is fine
                ping_interval=PING_EVERY_S,
                max_outstanding_pings=PINGS_MAX,
                drain_timeout=DRAIN_LIMIT_S,
                pending_size=BUFFER_BYTES_MAX,
            )
        )
        first: list[asyncio.Future[Any]] = [connecting, self._refused]
        await asyncio.wait(first, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done() or connecting.exception() is not None:
            connecting.cancel()
            (error,) = await asyncio.gather(connecting, return_exceptions=True)
            await self.close()
            if isinstance(error, Exception) and not self._refused.done():
                raise error
            reason = (
                self._refused.result()
                if self._refused.done()
                else f"no answer within {limit_s:g} s: {self._last_error}"
            )
            raise Unavailable(f"cannot connect to NATS at {self.addresses} ({reason}): {WHERE}")
        self._connected.set()

    async def close(self) -> None:
        """Deliver what is on its way, for up to 2 s, and hang up."""
        self._closing = True
        if self.client.is_connected:
            await self._ends(self.client.drain())
        if not self.client.is_closed:
            await self._ends(self.client.close())

    async def _ends(self, farewell: Coroutine[Any, Any, None]) -> None:
        """Wait for it in a task of its own: nats-py lets a cancelled reconnection cancel whoever closes the client."""
        ending = asyncio.create_task(farewell)
        await asyncio.wait([ending], timeout=CLOSE_LIMIT_S)
        if not ending.done():
            ending.cancel()
        elif not ending.cancelled() and (error := ending.exception()) is not None:
            self._logger.info("connection not ended in order", error=str(error))

    async def _error(self, error: Exception) -> None:
        self._last_error = error
        if "authorization violation" in str(error).lower() and not self._refused.done():
            self._refused.set_result(error)
        # While the server is away each attempt fails; that it is away has been said once.
        kind, now_s = type(error).__name__, asyncio.get_running_loop().time()
        if self.client.is_connected and now_s >= self._quiet_until.get(kind, 0):
            self._quiet_until[kind] = now_s + ONE_LINE_PER_S
            self._logger.warning("nats error", error=str(error), kind=kind)

    async def _disconnected(self) -> None:
        self._connected.clear()
        if not self._closing:
            self._logger.warning("nats disconnected")
        for limit in self._calls:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        for watcher in tuple(self._watchers):
            watcher.disconnected()

    async def _reconnected(self) -> None:
        self._connected.set()
        self._logger.info("nats reconnected")
        for watcher in tuple(self._watchers):
            watcher.reconnected()

    async def _ended(self) -> None:
        if not self._closing and not self._closed.done():
            self._closed.set_result(Unavailable(f"NATS at {self.addresses} ended the connection: {self._last_error}"))


async def connect(
    url: str,
    name: str,
    user: str | None = None,
    password: str | None = None,
    limit_s: float = CONNECT_LIMIT_S,
) -> NatsLink:
    """Connect to one of the servers in `url` (separated by commas). Errors: Unavailable."""
    servers = [each.strip() for each in url.split(",")]
    # Never the whole URL: it may hold a password.
    addresses = ",".join(urlsplit(each).netloc.rpartition("@")[2] for each in servers)
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    while True:
        link = NatsLink(addresses)
        try:
            await link.open(servers, name, user, password, limit_s)
        except (nats.errors.Error, OSError) as error:
            # nats-py tries again by itself, but not when closing the socket that failed fails too.
            if loop.time() >= end:
                raise Unavailable(f"cannot connect to NATS at {addresses} ({error}): {WHERE}") from error
            await asyncio.sleep(RECONNECT_EVERY_S)
        else:
            return link
