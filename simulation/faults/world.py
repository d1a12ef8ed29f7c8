"""One run of a scenario: the pool comes up, serves, is disturbed, heals, and comes to rest. Then, if there is more of the
story, the same pool goes on with that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from random import Random
from traceback import extract_tb
from typing import Any

from services.controller.liveness import SILENCE_NS
from services.router import hosting as router
from services.router.dispatch import DeclaredLost, Dispatcher
from shared.contracts.subjects import Subjects
from shared.runtime.appending import Fenced
from shared.runtime.memory import MemoryLog
from shared.runtime.ports import LogLost, Unavailable
from simulation.faults.befalling import befall
from simulation.faults.checkers import LogChecker, Violation
from simulation.faults.clients import Client, client
from simulation.faults.exchange import Exchange
from simulation.faults.network import Weather
from simulation.faults.operating import ask
from simulation.faults.place import Place
from simulation.faults.process import RUNS_IN, Outside, Process
from simulation.faults.quiet import check_caches, check_probes, check_rest, not_serving, restless
from simulation.faults.record import Tables
from simulation.faults.roles import POOL, Service, host, led_before
from simulation.faults.scenario import Request, Scenario, Story
from simulation.faults.scene import Scene, within_life
from simulation.faults.states import check_states

REST_S_MAX = 150.0
"""How long after the last fault everything must have come to rest."""

LOOK_EVERY_S = 0.5
RESTART_S = 0.5

NEVER_TOLD = frozenset(
    {
        "bad claim reply",
        "driver failed",
        "engine refused",
        "handler failed",
        "request without an end",
        "stream failed",
        "unreadable event",
    }
)
"""What services log when one of their beliefs is broken, whatever fails around them."""

ORDERLY_ENDS = (Fenced, LogLost, DeclaredLost, Unavailable, TimeoutError)
"""What may end a process of a failing world; everything else that does is a bug."""


class World:
    """`violations` is empty at the end of a run, or the run ended at the first of them. `goes_on` is asked for the next chapter
    whenever the pool has come to rest; its shape is the scenario's."""

    def __init__(self, scenario: Scenario, goes_on: Story = lambda _: None) -> None:
        self.violations: list[str] = []
        self._goes_on = goes_on
        shape = scenario.shape
        outside = Outside(f"{scenario.seed}", MemoryLog(), Exchange(), {}, Subjects(POOL), Weather())
        skew_ms = partial(Random(f"skews {scenario.seed}").randint, -shape.skews_ms, shape.skews_ms)
        self._client_of = partial(client, decodes=shape.decode_ranks > 0)
        self.scene = Scene(
            scenario=scenario,
            outside=outside,
            places={role: Place(role, skew_ms() * 1_000_000) for role in shape.roles},
            checker=LogChecker(self.violated, is_new=not shape.older),
            record=Tables(),
            clients=[self._client_of(f"c{number}", each) for number, each in enumerate(scenario.requests)],
        )
        self._digest = blake2b(digest_size=16)
        self._ended = asyncio.Event()
        self._parts: list[asyncio.Task[None]] = []
        self._instants = 0

    @property
    def digest(self) -> str:
        """Of everything that was stored, byte for byte and in order: two runs that agree in it were the same run."""
        return self._digest.hexdigest()

    def violated(self, rule: str) -> None:
        """Something that must hold does not: the run ends."""
        self.violations.append(f"at {asyncio.get_running_loop().time():.3f} s: {rule}")
        self._ended.set()

    def told(self, event: str) -> None:
        """Somebody has logged an error."""
        process = RUNS_IN.get()
        if event in NEVER_TOLD and (process is None or not process.link.dead):
            self.violated(f"{process.source if process else 'a client'}: {event}")

    def settled(self) -> None:
        """An instant is over: see now and then whether every state agrees with itself."""
        self._instants += 1
        if self._instants % self.scene.scenario.checks_every == 0 and not self.violations:
            try:
                check_states(self.scene)
            except AssertionError as broken:
                self.violated(f"{str(broken) or extract_tb(broken.__traceback__)[-1].line}")

    # --- the story

    async def run(self) -> None:
        """Returns when everything has been at rest, or with `violations`."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        everything = [self.scene.outside.subjects.all_events]
        await self.scene.outside.log.tail(everything, 0, self.scene.checker.take)
        await self.scene.outside.log.tail(everything, 0, lambda _subject, _seq, raw: self._digest.update(raw))
        if self.scene.scenario.shape.older:
            await led_before(self.scene.outside)
        for place in self.scene.places.values():
            self._begin(self._keep(place))
        story = self._begin(self._story())
        await asyncio.wait([story, asyncio.ensure_future(self._ended.wait())], return_when=asyncio.FIRST_COMPLETED)

    async def _story(self) -> None:
        scene = self.scene
        await self._chapter(scene.scenario, scene.clients, 0)
        chapters = count(1)
        while (chapter := self._goes_on(scene.checker.events)) is not None:
            number = next(chapters)
            check_caches(scene)
            clients = [self._client_of(f"c{number}-{each}", asked) for each, asked in enumerate(chapter.requests)]
            scene.clients += clients
            await self._chapter(chapter, clients, number)
        check_rest(scene)

    async def _chapter(self, scenario: Scenario, clients: Sequence[Client], number: int) -> None:
        """Until the pool has come to rest after everything that happens in it."""
        scene, began_s = self.scene, asyncio.get_running_loop().time()
        faults = [self._begin(befall(scene, each)) for each in scenario.faults]
        parts = [self._begin(self._live_as(each, began_s)) for each in clients]
        parts += [self._begin(ask(scene, each)) for each in scenario.asks]
        await asyncio.gather(*faults, *parts)
        self._parts = [each for each in self._parts if not each.done()]
        # Whoever was not heard through the last fault is declared lost by then, and only after it is the pool healed.
        await asyncio.sleep(SILENCE_NS / 1e9 + LOOK_EVERY_S)
        await self._until(not_serving)
        names = [f"probe{number}-{each}" for each in range(scene.scenario.shape.routers)]
        probes = [self._client_of(name, _probe(each)) for each, name in enumerate(names)]
        scene.clients += probes
        await asyncio.gather(*(self._live_as(each, began_s) for each in probes))
        check_probes(probes)
        await self._until(restless)

    async def _until(self, why_not: Callable[[Scene], str | None]) -> None:
        for _ in range(round(REST_S_MAX / LOOK_EVERY_S)):
            if (reason := why_not(self.scene)) is None:
                return
            await asyncio.sleep(LOOK_EVERY_S)
        raise Violation(f"no rest in {REST_S_MAX:g} s without a fault: {reason}")

    async def _live_as(self, each: Client, began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + each.asked.at_s - asyncio.get_running_loop().time()))
        await each.live(self._router)

    def _router(self, choice: float) -> tuple[Process, Dispatcher] | None:
        """As a load balancer does: one of those that say they are ready."""
        ready = [
            (place.process, hosted.dispatcher)
            for place, hosted in self.scene.hosted(router.Hosted)
            if place.process is not None and hosted.dispatcher.not_ready() is None
        ]
        return ready[int(choice * len(ready))] if ready else None

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A part of the world itself: if it fails, the run does."""
        task = asyncio.ensure_future(work)
        self._parts.append(task)
        task.add_done_callback(self._part_ended)
        return task

    def _part_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.violated(f"{type(error).__name__}: {error}")

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task of a living process failed, and nobody looked."""
        process, error = RUNS_IN.get(), context.get("exception")
        if error is not None and (process is None or not process.link.dead):
            self.violated(f"{context['message']}: {type(error).__name__}: {error}")

    # --- processes

    async def _keep(self, place: Place) -> None:
        """A supervisor: whatever ends begins again."""
        for life in count(1):
            await place.startable()
            process = place.begin(Process(place.name, life, self.scene.outside, place.skew_ns))
            await self._live(place, process)
            place.end()
            await asyncio.sleep(RESTART_S)

    async def _live(self, place: Place, process: Process) -> None:
        starting = process.run(self._host(process))
        if not await within_life(place, starting):
            return
        if (error := starting.exception()) is not None:
            self._judge(process, error)
            return
        place.service = service = starting.result()
        failures = [process.run(_failure(each)) for each in service.failures]
        ends = [asyncio.ensure_future(each.wait()) for each in (process.died, place.stop_ordered)]
        await asyncio.wait([*ends, *failures], return_when=asyncio.FIRST_COMPLETED)
        if place.stop_ordered.is_set() and place.lives:
            stopping = process.run(service.stop())
            if await within_life(place, stopping) and (error := stopping.exception()) is not None:
                self._judge(process, error)
        elif place.lives:
            self._judge(process, next(each.result() for each in failures if each.done()))
        for end in ends:
            end.cancel()

    async def _host(self, process: Process) -> Service:
        if process.name == "ledger":
            return await self.scene.record.host(process, self.scene.outside.subjects.all_events)
        return await host(process, self.scene.scenario.shape)

    def _judge(self, process: Process, error: BaseException) -> None:
        if not isinstance(error, ORDERLY_ENDS):
            self.violated(f"{process.source} ended with {type(error).__name__}: {error}")


async def _failure(failed: Awaitable[Exception]) -> Exception:
    try:
        return await failed
    except Exception as error:  # noqa: BLE001 - judged by the world
        return error


def _probe(number: int) -> Request:
    """A request like any other: once everything has healed, it must be served."""
    return Request(at_s=0.0, documents=(0,), tail_tokens=5 + number, max_tokens=4, router=number / 8)
