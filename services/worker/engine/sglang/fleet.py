"""The servers of one engine: joining them, following their caches, and noticing that one is gone.

A prefill server that is lost ends the engine, because what its units held is lost; a decode server that is lost ends the
streams it had, and the engine only when none is left.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import zmq.asyncio

from services.worker.engine.protocol import EngineDied, EngineError
from services.worker.engine.sglang.facts import Facts, decode_refusals, refusals
from services.worker.engine.sglang.health import PROBE_S, Vitals
from services.worker.engine.sglang.model_facts import ModelFacts
from services.worker.engine.sglang.process import ServerProcess
from services.worker.engine.sglang.server import Server, ServerLost
from services.worker.engine.sglang.settings import SglangSettings
from services.worker.engine.sglang.subscription import EventStream, follow_load
from services.worker.engine.sglang.unit_cache import UnitCache
from shared.model.lattice import Group
from shared.runtime.clock import Clock

JOIN_POLL_S = 0.5


class Place(NamedTuple):
    """Where a worker's requests go: a server, and which of its units leads the worker (None if it has one cache)."""

    server: Server
    unit: int | None


class Fleet:
    """`start`, then `close`. `changed` is called whenever a unit's pages have changed, `decode_died` with the rank of a decode
    server whose streams will not go on."""

    def __init__(
        self,
        settings: SglangSettings,
        model: ModelFacts,
        clock: Clock,
        changed: Callable[[], None],
        decode_died: Callable[[int, str], None],
    ) -> None:
        self._settings, self._model, self._clock = settings, model, clock
        self._changed, self._decode_died = changed, decode_died
        self.servers = [Server(address.url, settings.key) for address in settings.servers]
        self.decode = [Server(address.url, settings.key) for address in settings.decode]
        self.down = [False] * len(self.decode)
        self.facts: dict[Server, Facts] = {}
        caches = [UnitCache() for _ in range(settings.units)]
        self.units = [caches[rank * len(caches) // settings.prefill_ranks] for rank in range(settings.prefill_ranks)]
        """The cache of each rank: ranks of one server of fixed degree share it."""
        self.starting = "not started"
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = ServerProcess(settings.launch, clock) if settings.launch else None
        self._context = zmq.asyncio.Context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pids: dict[Server, list[int]] = {}
        self._logger = structlog.get_logger(component="fleet")

    def place(self, group: Group) -> Place:
        """Where the group's requests go."""
        if self._settings.adaptive:
            return Place(self.servers[0], group.first_rank)
        return Place(self.servers[group.first_rank // self._settings.degree], None)

    def check(self) -> None:
        """EngineDied if a server is gone."""
        if self.lost.done():
            raise EngineDied(self.lost.result())

    def lose(self, reason: str) -> None:
        """Give the engine up. The first reason counts."""
        if not self.lost.done():
            self._logger.warning("lost", reason=reason)
            self.lost.set_result(reason)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that ends with the fleet at the latest. An error of it ends the fleet: who follows a cache no more would
        believe what it knew for ever."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lose(f"{type(error).__name__}: {error}")

    # --- joining

    async def start(self) -> None:
        """Errors: EngineError with everything for which servers are refused, or why one does not answer."""
        if self._process is not None:
            try:
                self._process.start()
            except OSError as error:
                raise EngineError(f"sglang_launch: {error}") from error
        try:
            async with asyncio.timeout(self._settings.start_limit_s):
                for server in [*self.servers, *self.decode]:
                    self.facts[server] = await self._join(server)
        except TimeoutError:
            raise EngineError(f"sglang_start_s: {self.starting} for {self._settings.start_limit_s:g} s") from None
        found: list[str] = []
        for server, address in zip(self.servers, self._settings.servers, strict=True):
            found += refusals(self.facts[server], address, self._settings, self._model)
        for server in self.decode:
            found += decode_refusals(self.facts[server], server.url, self._settings, self._model)
        if found:
            raise EngineError("; ".join(found))
        await self._follow()

    async def _join(self, server: Server) -> Facts:
        while True:
            try:
                return await server.join()
            except ServerLost as error:
                self.starting = f"{server.url} does not answer ({error})"
                if self._process is not None and (ended := self._process.ended):
                    raise EngineError(f"sglang_launch: {ended}") from None
                await self._clock.sleep(JOIN_POLL_S)

    async def _follow(self) -> None:
        streams = []
        for index, server in enumerate(self.servers):
            host, published = self._settings.servers[index].host, self.facts[server].kv_events
            assert published is not None, "a server without events is refused"
            vitals = Vitals(server.url, self.facts[server].boot, round(self._settings.silence_s * 1e9))
            first = self._settings.degree * index
            for rank in range(published.dp_size):
                replay = published.replay_endpoint_port_base
                streams.append(
                    EventStream(
                        self._context,
                        published.address(published.endpoint_port_base, rank, host),
                        None if replay is None else published.address(replay, rank, host),
                        self.units[first + rank],
                        self._changed,
                        vitals.restarted,
                    )
                )
                self.spawn(streams[-1].run())
                if (load := published.load_endpoint_port_base) is not None:
                    heard = partial(self._heard, vitals, rank)
                    self.spawn(follow_load(self._context, f"tcp://{host}:{load + rank}", heard))
            self.spawn(self._watch(server, vitals))
        gone: set[int] = set()
        for rank, server in enumerate(self.decode):
            self.spawn(self._watch_decode(rank, server, gone))
        self.starting = "KV events are not replayed"
        ready = asyncio.create_task(_all_ready(streams))
        limit_s = self._settings.start_limit_s
        try:
            await asyncio.wait((ready, self.lost), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        self.check()
        if silent := [stream.endpoint for stream in streams if not stream.ready.is_set()]:
            raise EngineError(f"sglang_start_s: no KV events can be had from {', '.join(silent)} for {limit_s:g} s")
        self.starting = ""

    # --- watching

    def watch_processes(self, server: Server, pids: list[int]) -> None:
        """From now on the server is given up when one of these processes of this machine is gone."""
        self._pids[server] = pids

    def _heard(self, vitals: Vitals, rank: int) -> None:
        vitals.heard(rank, self._clock.monotonic_ns())

    async def _watch(self, server: Server, vitals: Vitals) -> None:
        while (reason := self._verdict(server, vitals)) is None:
            await self._clock.sleep(PROBE_S)
            try:
                await server.probe()
                vitals.answered((await server.facts()).boot if vitals.doubtful else None)
            except ServerLost as error:
                vitals.failed(error.failure, str(error))
            except EngineError as error:
                vitals.failed("unanswered", str(error))
        self.lose(reason)

    def _verdict(self, server: Server, vitals: Vitals) -> str | None:
        if gone := [pid for pid in self._pids.get(server, []) if not runs(pid)]:
            vitals.lost_processes(gone)
        if self._process is not None and (ended := self._process.ended):
            return ended
        return vitals.verdict(self._clock.monotonic_ns())

    async def _watch_decode(self, rank: int, server: Server, gone: set[int]) -> None:
        """A decode server may come back, if it fits as it did: it holds nothing that anybody counts on. `gone` has those that
        are given up."""
        while True:
            vitals = Vitals(server.url, "", round(self._settings.silence_s * 1e9))
            while (reason := vitals.verdict(self._clock.monotonic_ns())) is None:
                await self._clock.sleep(PROBE_S)
                try:
                    await server.probe()
                    if self.down[rank]:
                        await self._rejoin(server)
                    vitals.answered()
                    self.down[rank] = False
                    gone.discard(rank)
                except EngineError as error:
                    failure = error.failure if isinstance(error, ServerLost) else "unanswered"
                    vitals.failed(failure, str(error))
                    self.lose_decode(rank, str(error))
            self._decode_died(rank, reason)
            gone.add(rank)
            if len(gone) == len(self.decode):
                self.lose(f"no decode server answers: {reason}")

    async def _rejoin(self, server: Server) -> None:
        """Whoever answers now may be another life, started in another way. Errors: EngineError with everything for which it is
        refused, or why it does not answer."""
        facts = await server.join()
        if found := decode_refusals(facts, server.url, self._settings, self._model):
            raise EngineError("; ".join(found))
        self.facts[server] = facts

    def lose_decode(self, rank: int, reason: str) -> None:
        """It does not answer: while others do, nothing is sent to it until it does again."""
        if not self.down[rank]:
            self._logger.warning("decode server does not answer", rank=rank, reason=reason)
        self.down[rank] = True

    # --- end

    async def close(self) -> None:
        """Safe to repeat."""
        self.lose("the engine was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        for server in [*self.servers, *self.decode]:
            await server.close()
        if self._process is not None:
            await self._process.stop()


async def _all_ready(streams: Sequence[EventStream]) -> None:
    for stream in streams:
        await stream.ready.wait()


def runs(pid: int) -> bool:
    """Whether a process of this machine is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
