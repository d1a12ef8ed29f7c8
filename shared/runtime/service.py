"""What each service's `__main__` wires: connections, the log, health, metrics, and an orderly end."""

import asyncio
import random
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import structlog
import uvicorn
import uvloop
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import ValidationError

from shared.contracts.ids import Source
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Identity, Sealer
from shared.runtime.clock import Clock, Ids, SystemClock
from shared.runtime.http_limits import KEEP_ALIVE_S, BoundedHttp, Turns, connections_max
from shared.runtime.keepsake import BadKeepsake
from shared.runtime.lease import CellLease
from shared.runtime.nats_bus import NatsBus
from shared.runtime.nats_cell import KEEPSAKE, LEASES, SNAPSHOTS, NatsCell, open_buckets, open_snapshots
from shared.runtime.nats_link import NatsLink, connect
from shared.runtime.nats_log import open_log
from shared.runtime.ports import Bus, Cell, EventLog, Lease, LogLost, Unavailable
from shared.runtime.server_checks import ServerUnfit, require_nats
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import configure_logging, process_metrics

STOP_LIMIT_S = 30.0
"""For a service's own `on_stop`; a router lets open streams end in it."""

HANG_UP_S = 5
"""For what is still open after that."""

_BACKLOG = 2_048


class Runtime(NamedTuple):
    """What a service stands on. `bulk` is a connection of its own for claims and token frames, `keepsake` holds what is kept
    of events that the log has dropped, `snapshots` holds folded states by key, `lease` is the leadership of a role in this
    pool."""

    settings: ServiceSettings
    clock: Clock
    ids: Ids
    log: EventLog
    keepsake: Cell
    snapshots: Callable[[str], Cell]
    bus: Bus
    bulk: Bus
    subjects: Subjects
    source: Source
    metrics: CollectorRegistry
    lease: Callable[[str], Lease]

    def sealer(self, sender: str) -> Sealer:
        """For events published as `sender`: the source, or the agent's node."""
        identity = Identity(self.settings.pool, self.source, sender)
        return Sealer(identity, self.subjects, self.clock, self.ids)


@asynccontextmanager
async def open_runtime(settings: ServiceSettings, service: str) -> AsyncIterator[Runtime]:
    """Connect, check the server, open the log.

    Errors: Unavailable (no server; or, while the block runs, a connection that ended for good: the block is cancelled);
    ServerUnfit.
    """
    clock = SystemClock()
    ids = Ids(clock, random.Random())
    source = Source(f"{service}-{settings.instance}-{secrets.token_hex(4)}")
    configure_logging(service, source, settings.log_level)
    subjects = Subjects(settings.pool)
    async with AsyncExitStack() as stack:
        link, bulk = [await _link(stack, settings, f"{source}{suffix}") for suffix in ("", "-bulk")]
        server = await require_nats(link.client)
        log = await open_log(link, subjects, settings, clock, ids)
        await open_buckets(link, subjects, settings.stream_replicas, clock)
        await open_snapshots(link, subjects, settings.stream_replicas, clock)
        buses = [NatsBus(each) for each in (link, bulk)]
        for bus in buses:
            stack.push_async_callback(bus.close)
        structlog.get_logger(component="runtime").info(
            "connected", server=link.addresses, version=server.version, log=log.identity, pool=settings.pool
        )
        runtime = Runtime(
            settings=settings,
            clock=clock,
            ids=ids,
            log=log,
            keepsake=NatsCell(link, subjects, KEEPSAKE, "pool"),
            snapshots=lambda key: NatsCell(link, subjects, SNAPSHOTS, key),
            bus=buses[0],
            bulk=buses[1],
            subjects=subjects,
            source=source,
            metrics=process_metrics(),
            lease=lambda role: CellLease(NatsCell(link, subjects, LEASES, role), source, clock),
        )
        async with _while_connected(link, bulk):
            yield runtime


async def _link(stack: AsyncExitStack, settings: ServiceSettings, name: str) -> NatsLink:
    link = await connect(settings.nats_url, name, settings.nats_user, settings.nats_password())
    stack.push_async_callback(link.close)
    return link


@asynccontextmanager
async def _while_connected(*links: NatsLink) -> AsyncIterator[None]:
    """Cancel the block when a link ends for good, and raise why."""
    block = asyncio.current_task()
    assert block is not None, "a service runs in a task"
    ended: list[Exception] = []

    async def watch(link: NatsLink) -> None:
        ended.append(await link.closed())
        block.cancel()

    watches = [asyncio.create_task(watch(link)) for link in links]
    try:
        yield
    except asyncio.CancelledError:
        if not ended:
            raise
        block.uncancel()
        raise ended[0] from None
    finally:
        for task in watches:
            task.cancel()


def probes(ready: Callable[[], str | None], metrics: CollectorRegistry) -> APIRouter:
    """`/healthz`, `/metrics`, and `/readyz`: 503 with the reason for as long as `ready` returns one. `/health` is the name
    that inference servers give the last, and load generators ask for it."""
    router = APIRouter()

    @router.get("/healthz", include_in_schema=False)
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @router.get("/health", include_in_schema=False)
    @router.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        reason = ready()
        return Response(f"{reason or 'ok'}\n", status_code=503 if reason else 200, media_type="text/plain")

    @router.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    return router


class CannotListen(Exception):
    """The address for HTTP is taken, or not this machine's."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` has to do things before HTTP ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: FastAPI,
    settings: ServiceSettings,
    failures: Sequence[Awaitable[Exception]],
    on_stop: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve HTTP until SIGTERM or SIGINT: then `on_stop`, for up to 30 s and still serving, then the end; a second signal
    ends it at once. Raises what the first of `failures` returns. Errors: CannotListen.
    """
    logger = structlog.get_logger(component="http")
    listener = _listen(settings.http_host, settings.http_port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        app,
        http=partial(BoundedHttp, Turns()),  # type: ignore[arg-type]  # it is only called
        ws="none",
        limit_concurrency=connections_max(),
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=HANG_UP_S,
    )
    server = _Server(config)
    stopping, hurry = asyncio.Event(), asyncio.Event()
    watches = [asyncio.ensure_future(each) for each in failures]
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stop = asyncio.create_task(stopping.wait())
    try:
        with _signals(stopping, hurry):
            logger.info("listening", host=host, port=port)  # who waits for this may end it
            await asyncio.wait([http, stop, *watches], return_when=asyncio.FIRST_COMPLETED)
            failure = _first_failure(watches)
            if failure is None and on_stop is not None:
                await _stop_in_time(on_stop, hurry)
            server.should_exit = True
            server.force_exit = hurry.is_set()
            await http
    finally:
        for task in (stop, *watches):
            task.cancel()
        listener.close()
    if failure is not None:
        logger.critical("failed", error=f"{type(failure).__name__}: {failure}")
        raise failure
    logger.info("stopped")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise CannotListen(f"VERTUMNUS_HTTP_HOST, VERTUMNUS_HTTP_PORT: {host}:{port}: {error.strerror}") from error


def _first_failure(watches: Sequence["asyncio.Future[Exception]"]) -> Exception | None:
    done = next((each for each in watches if each.done()), None)
    return done.result() if done is not None else None


async def _stop_in_time(on_stop: Callable[[], Awaitable[None]], hurry: asyncio.Event) -> None:
    stopped = asyncio.ensure_future(on_stop())
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait([stopped, hurried], timeout=STOP_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not stopped.done():
        structlog.get_logger(component="http").warning("stop cut short", limit_s=STOP_LIMIT_S)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
    else:
        stopped.result()


@contextmanager
def _signals(stopping: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets `stopping`, the next one `hurry`."""
    loop = asyncio.get_running_loop()

    def arrived() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, arrived)
    try:
        yield
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service to its end. What an operator can mend ends it with one line on stderr, and with code 1 or 2."""
    try:
        uvloop.run(main())
    except (ServerUnfit, Unavailable, LogLost, BadKeepsake, CannotListen) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except ValidationError as error:
        if not error.title.endswith("Settings"):
            raise
        # A service reads its settings first thing; the variables are named after the fields.
        for each in error.errors(include_url=False, include_input=False):
            variable = "VERTUMNUS_" + "_".join(str(part).upper() for part in each["loc"])
            sys.stderr.write(f"{variable}: {each['msg']}\n")
        sys.exit(2)
