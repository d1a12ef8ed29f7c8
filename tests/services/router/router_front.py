"""A router's dispatcher with its real log, bus and outbox in memory, and agents that follow a script.

A scripted agent speaks the real commands. What it generates depends on every token before, as an engine's greedy choice does:
an answer that is continued elsewhere must be the answer that nobody interrupted.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from router_world import committed, registered

from services.router import decider
from services.router.calls import Call, Order
from services.router.dispatch import Dispatcher
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings
from shared.contracts.commands import (
    Accepted,
    Assign,
    Cancel,
    Claim,
    RefusalReason,
    Refused,
    Release,
    Released,
    Reply,
    SamplingSpec,
    TokenFrame,
    decode_command,
    encode_message,
)
from shared.contracts.envelope import EventData
from shared.contracts.events import NodeLost, PrefillAborted, PrefillCompleted, PrefillStarted
from shared.contracts.ids import NodeId, RequestId, Source, TenantId, node_of
from shared.contracts.subjects import Subjects
from shared.model.cost import Coefficients
from shared.model.lattice import Composition
from shared.runtime.appending import NO_ORIGIN, Identity, Sealer, append_once, last_sequence
from shared.runtime.clock import Ids, SystemClock
from shared.runtime.lease import CellLease
from shared.runtime.memory import MemoryBus, MemoryCell, MemoryLog
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime
from tests.support.replica import eventually

SUBJECTS = Subjects("main")
SOURCE = Source("router-1-0000")
FAST = Coefficients(version="fast", d=0.001, a=0.0, b=0.0, c=0.0, alpha=0.0)
STOP_TOKEN = 7


def next_token(said: list[int]) -> int:
    """Never the stop token."""
    return 1_000 + sum(position * token for position, token in enumerate(said, 1)) % 8_999


def continuation(prompt: list[int], count: int) -> list[int]:
    """The answer that nobody interrupted."""
    said = list(prompt)
    for _ in range(count):
        said.append(next_token(said))
    return said[len(prompt) :]


class Front:
    """One router in memory. `log` and `bus` are everybody's."""

    def __init__(self, tmp_path: Path, coefficients: Coefficients, **settings: Any) -> None:
        key = tmp_path / "key"
        key.write_bytes(b"k" * 32)
        fast = {"ack_timeout_s": 0.5, "no_worker_wait_s": 0.5, "first_token_slack_s": 5.0, "idle_timeout_s": 5.0}
        self.settings = RouterSettings(block_key_file=key, **{**fast, **settings})
        self.clock = SystemClock()
        self.ids = Ids(self.clock, random.Random(7))
        self.log = MemoryLog()
        self.bus = MemoryBus(self.clock)
        self.events: list[EventData] = []
        self._agents_seq: dict[str, int] = {}
        runtime = Runtime(
            settings=self.settings,
            clock=self.clock,
            ids=self.ids,
            log=self.log,
            keepsake=MemoryCell(),
            snapshots=lambda key: MemoryCell(),
            bus=self.bus,
            bulk=self.bus,
            subjects=SUBJECTS,
            source=SOURCE,
            metrics=CollectorRegistry(),
            lease=lambda role: CellLease(MemoryCell(), role, self.clock),
        )
        self.projection = Projection(self.log, [SUBJECTS.all_events], decider.initial(coefficients), decider.evolve)
        self.projection.listen(lambda stored: self.events.append(stored.data))
        self.outbox = Outbox(self.projection, runtime.sealer(SOURCE), self.clock)
        self.dispatcher = Dispatcher(
            runtime, self.settings, self.projection, self.outbox, RouterMetrics(runtime.metrics)
        )

    @property
    def state(self) -> decider.State:
        return self.projection.state

    async def tell(self, *facts: EventData, sender: str, source: str | None = None) -> None:
        """Append to the log as another process."""
        name = Source(source or f"{sender}-source")
        sealer = Sealer(Identity("main", name, sender), SUBJECTS, self.clock, self.ids)
        sealer.next_seq = self._agents_seq.get(name, 0) + 1
        self._agents_seq[name] = sealer.next_seq + len(facts) - 1
        entries = [entry for _, entry in sealer.seal(facts, NO_ORIGIN)]
        expected = {each.subject: await last_sequence(self.log, each.subject, self.clock) for each in entries}
        await append_once(self.log, entries, expected, self.clock)

    def order(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> Order:
        fields = {
            "request": RequestId(str(self.ids.next())),
            "tenant": TenantId("default"),
            "model": "toy",
            "tokens": np.asarray(prompt, dtype=np.uint32),
            "chain": (),
            "max_tokens": max_tokens,
            "stop_tokens": (STOP_TOKEN,),
            "sampling": SamplingSpec(),
            "stream": True,
            "arrived_ns": self.clock.monotonic_ns(),
        }
        return Order(**{**fields, **more})

    async def submit(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> Call:
        slot = self.dispatcher.enter()
        try:
            return await self.dispatcher.submit(self.order(prompt, max_tokens, **more), slot)
        except BaseException:
            slot.release()
            raise

    async def answer(self, prompt: list[int], max_tokens: int = 8, **more: Any) -> list[int]:
        """Every token of one request."""
        return await tokens_of(await self.submit(prompt, max_tokens, **more))

    def told(self, kind: type[EventData]) -> list[Any]:
        return [each for each in self.events if isinstance(each, kind)]

    async def settled(self) -> None:
        """Every request has ended and the log knows it."""
        await eventually(lambda: not self.dispatcher.open_requests and not self.outbox.events)


async def tokens_of(call: Call) -> list[int]:
    return [token async for piece in call.pieces() for token in piece.tokens]


Behave = Callable[["Agent", Assign], Awaitable[None]]


class Agent:
    """One node. `refusals` are given to the next assignments, `silent` answers none, `behave` is what an accepted one does."""

    def __init__(self, front: Front, node: str, behave: Behave | None = None) -> None:
        self.front = front
        self.node = node
        self.behave: Behave = behave or serve
        self.refusals: list[RefusalReason] = []
        self.silent = False
        self.assigns: list[Assign] = []
        self.cancelled: list[tuple[str, int]] = []
        self.released: list[tuple[str, int]] = []
        self.silent_on_release = False
        self.queued: dict[tuple[str, int], asyncio.Event] = {}
        """Assignments that wait for their first step: set the event to let it begin."""
        self.claims: dict[tuple[str, int], list[int]] = {}
        self._jobs: set[asyncio.Task[None]] = set()

    async def start(self, composition: Composition, **spec: Any) -> None:
        ranks = sum(composition)
        await self.front.bus.subscribe(SUBJECTS.agent(NodeId(self.node)), self._obey)
        await self.front.tell(registered(self.node, ranks, epoch=1, composition=composition, **spec), sender=self.node)
        await self.front.tell(committed(composition, self.node), sender="controller", source="controller")

    async def frame(self, assign: Assign, index: int, tokens: list[int], **more: Any) -> None:
        frame = TokenFrame(request=assign.request, attempt=assign.attempt, index=index, tokens=tuple(tokens), **more)
        await self.front.bus.publish(SUBJECTS.frames(assign.router, assign.request), encode_message(frame))

    async def tell(self, *facts: EventData) -> None:
        await self.front.tell(*facts, sender=self.node)

    async def claim(self, assign: Assign) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < assign.prompt_tokens:
            claim = Claim(request=assign.request, attempt=assign.attempt, offset=len(tokens))
            raw = await self.front.bus.request(SUBJECTS.claim(assign.router), encode_message(claim), 1.0)
            if not raw:
                break
            tokens += np.frombuffer(raw, dtype="<u4").tolist()
        self.claims[assign.request, assign.attempt] = tokens
        return tokens

    async def prefill(self, assign: Assign) -> list[int]:
        """Claim, start, complete; the prompt."""
        prompt = await self.claim(assign)
        await self.tell(
            PrefillStarted(request=assign.request, attempt=assign.attempt, worker=assign.worker, queue_us=3),
            PrefillCompleted(
                request=assign.request,
                attempt=assign.attempt,
                worker=assign.worker,
                node_epoch=1,
                computed_tokens=len(prompt),
                cached_own_tokens=0,
                queue_us=3,
                prefill_us=5,
            ),
        )
        return prompt

    async def abort(self, assign: Assign, reason: str) -> None:
        await self.tell(
            PrefillAborted.model_validate(
                {"request": assign.request, "attempt": assign.attempt, "worker": assign.worker, "reason": reason}
            )
        )

    async def die(self) -> None:
        self.silent = True
        for job in self._jobs:
            job.cancel()
        await self.tell(NodeLost(node=NodeId(self.node), incarnation=1, reason="test"))

    async def _obey(self, _subject: str, payload: bytes) -> bytes | None:
        reply = self._reply(payload)
        return encode_message(reply) if reply is not None else None

    def _reply(self, payload: bytes) -> Reply | None:
        match decode_command(payload):
            case Assign() as assign:
                assert node_of(assign.worker) == self.node
                self.assigns.append(assign)
                if self.silent:
                    return None
                if self.refusals:
                    return Refused(reason=self.refusals.pop(0))
                job = asyncio.ensure_future(self.behave(self, assign))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)
                return Accepted()
            case Cancel() as cancel:
                self.cancelled.append((cancel.request, cancel.attempt))
                return Accepted()
            case Release() as release:
                key = (release.request, release.attempt)
                self.released.append(key)
                if self.silent_on_release:
                    return None
                if self.queued.pop(key, None) is None:
                    return Released(outcome="started")
                assign = next(each for each in self.assigns if (each.request, each.attempt) == key)
                self._jobs.add(asyncio.ensure_future(self.abort(assign, "released")))
                return Released(outcome="released")
            case other:
                raise AssertionError(f"a router does not say {other.kind}")


async def serve(agent: Agent, assign: Assign) -> None:
    """Every token, one frame each."""
    await serve_some(agent, assign, assign.max_new_tokens)


async def serve_some(agent: Agent, assign: Assign, count: int) -> None:
    """The first `count` tokens, then nothing."""
    prompt = await agent.prefill(assign)
    tokens = continuation(prompt, assign.max_new_tokens)
    for index, token in enumerate(tokens[:count]):
        finish = "length" if index + 1 == assign.max_new_tokens else None
        await agent.frame(assign, index, [token], finish=finish, queue_us=3, prefill_us=5)
        await asyncio.sleep(0)


async def serve_when_told(agent: Agent, assign: Assign) -> None:
    """Waits in the queue until its event is set; one that was released does nothing."""
    begin = agent.queued[assign.request, assign.attempt] = asyncio.Event()
    await begin.wait()
    if agent.queued.pop((assign.request, assign.attempt), None) is not None:
        await serve(agent, assign)


@asynccontextmanager
async def front(tmp_path: Path, coefficients: Coefficients = FAST, **settings: Any) -> AsyncIterator[Front]:
    """A started router; everything recorded is in the log when the block ends."""
    made = Front(tmp_path, coefficients, **settings)
    await made.projection.start()
    await made.outbox.start()
    await made.dispatcher.start()
    try:
        yield made
        made.state.loads.check()
        await made.dispatcher.drain()
        assert not made.dispatcher._claims.held_bytes, "a prompt is kept for nobody"
    finally:
        await made.dispatcher.drain()
        await made.outbox.stop()
        await made.bus.close()
