"""What a client may cost a service in memory, time and connections before its request, and after its answer.

uvicorn leaves these to a proxy in front: it takes request lines and headers of any size (measured: a URL of 60 MB stops the
event loop for 9 s, longer than a router may be silent), waits for their end without a limit, and keeps a connection whose
client does not read. Rules:

1.  A request's head has `HEAD_BYTES_MAX` bytes and arrives within `HEAD_S_MAX`, from the connection or its first byte on.
2.  A client that reads nothing for `STALLED_S_MAX` is hung up on, whether its answer is complete or not.
3.  Behind an answer that came before the whole request, the rest is read for `LINGER_S`, so that the answer arrives.
4.  A connection that ends ends every request on it, also the one that others were pipelined behind.
5.  There are at most `connections_max()` connections; one more is told so.
6.  `BEGIN_PER_TURN` requests begin in one turn of the event loop: 2,000 that come at once take seconds until each has met its
    first wait, and a router that sends no heartbeat for three is taken for dead.
"""

import asyncio
import resource
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES_MAX = 64 * 1024
"""Twice what the router takes as headers, so that it is the router that refuses most. One read of the socket (256 KiB)
may come on top."""

HEAD_S_MAX = 10.0
STALLED_S_MAX = 60.0
LINGER_S = 5.0

KEEP_ALIVE_S = 75
"""An idle connection stays open longer than clients use it again (httpx, and so OpenAI's client, for 5 s; aiohttp for 15). With
uvicorn's 5 s both ended it at once, and of 2,000 requests up to four met a connection that was just being closed."""

BEGIN_PER_TURN = 16
"""The dearest take some 3 ms of processor time each."""

CONNECTIONS_MAX = 4_096
OTHER_FILES = 128
"""Descriptors that are not a client's: logs, connections to NATS and Postgres, and what a library opens for a moment."""


def connections_max() -> int:
    """The limit, or what the process's limit of open files leaves of it; that one is raised first, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft) - OTHER_FILES)


class Turns:
    """Who begins when, for all connections of a server."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def begin(self, loop: asyncio.AbstractEventLoop, start: Callable[[], None]) -> None:
        """Call `start` in one of the next turns of the loop, in order."""
        if not self._waiting:
            loop.call_soon(self._turn, loop)
        self._waiting.append(start)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(BEGIN_PER_TURN, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            loop.call_soon(self._turn, loop)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with the rules above. `limit_concurrency` of its configuration is the number of connections."""

    def __init__(self, turns: Turns, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None
        self._head_bytes: int | None = None
        """Of the head that is arriving, without the read it began in; None between heads."""
        self._head_began = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections_max is not None and len(self.connections) > self._connections_max:
            self._hang_up(503, f"{self._connections_max} connections are open, which is the limit", "overloaded")
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._stall_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    # --- the request

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_began = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes is None:
            self._expect_head_if_idle()
        elif not self._head_began:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                message = f"the request line and headers have over {HEAD_BYTES_MAX} bytes, which is the limit"
                self._hang_up(431, message, "headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._head_began = 0, True
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def send_400_response(self, msg: str) -> None:
        self._hang_up(400, msg, "bad_http")

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self._head_is_late)

    def _expect_head_if_idle(self) -> None:
        """Blank lines between two requests end uvicorn's wait for the next one."""
        if self._answering is not None and self._answering.response_complete and self.timeout_keep_alive_task is None:
            self._expect_head()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes is None:
            # Nothing was asked: an answer might be taken for the one to a request that is just on its way.
            self.transport.close()
        else:
            self._hang_up(408, f"the headers took over {HEAD_S_MAX:g} s to arrive", "request_timeout")

    # --- the answer

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._turns.begin(self.loop, lambda: self._start_if_wanted(cycle, app))

    def _start_if_wanted(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not cycle.disconnected:
            super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def on_response_complete(self) -> None:
        is_early = self._answering is not None and self._answering.more_body
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(STALLED_S_MAX, self._abort_if_unread)
        if is_early and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(LINGER_S, self._close)

    def _abort_if_unread(self) -> None:
        """A transport that is closing waits for its last bytes to be taken, if need be for ever."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.transport.abort()

    def _close(self) -> None:
        self.transport.close()

    def _hang_up(self, status: int, message: str, code: str) -> None:
        """Answer in the form of the API, if nothing else is being answered, and close."""
        if self._answering is None or self._answering.response_complete:
            kind = "server_error" if status >= 500 else "invalid_request_error"
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = orjson.dumps({"error": error})
            head = (
                STATUS_LINE[status],
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body),
            )
            self.transport.write(b"".join((*head, body)))
        self.transport.close()
