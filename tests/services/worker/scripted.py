"""A node's agent with everything around it in memory: log, bus and clock, the modelled engine, and a router that follows a
script. Nothing here is a mock of the agent's own parts."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import CollectorRegistry

from services.worker.agent import NodeAgent
from services.worker.composer import StepLimits
from services.worker.decider import evolve, initial
from services.worker.engine.modelled import ModelledEngine, ModelledNode
from services.worker.job import Stage
from services.worker.metrics import WorkerMetrics
from services.worker.ports import NodePorts
from shared.contracts.codec import decode
from shared.contracts.commands import (
    Adopt,
    Assign,
    Claim,
    Reply,
    SamplingSpec,
    TokenFrame,
    decode_reply,
    encode_message,
)
from shared.contracts.envelope import Channel, Envelope, EventData, Stored
from shared.contracts.events import CommittedWorker, EpochCommitted, RequestReceived
from shared.contracts.ids import NodeId, RequestId, RouterId, Source, TenantId, WorkerId, decode_worker_id, worker_id
from shared.contracts.message import (
    Message,
)
from shared.contracts.subjects import Subjects
from shared.model import pool as pool_model
from shared.model.blocks import Tokens, block_chain
from shared.model.cost import Coefficients
from shared.model.lattice import Composition, groups_of
from shared.model.pool import Pool
from shared.runtime.appending import NO_ORIGIN, Identity, Sealer
from shared.runtime.clock import Ids
from shared.runtime.memory import ManualClock, MemoryBus, MemoryLog
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection

NODE = NodeId("n0")
ROUTER = RouterId("r1")
ROUTER_SOURCE = "router-r1-0001"
BLOCK_TOKENS = 16
KEY = b"k" * 32
SUBJECTS = Subjects("test")

COSTS = Coefficients(version="test-1", d=0.0, a=0.001, b=0.0, c=0.0, alpha=0.0)
"""One millisecond per uncached token at every degree: a test can read times off its prompts."""

SMALL = ModelledNode(
    model="modelled",
    model_revision="1",
    tokenizer_revision="1",
    vocabulary=10_000,
    prefill_ranks=4,
    decode_ranks=1,
    block_tokens=BLOCK_TOKENS,
    blocks_per_rank=64,
    context_tokens_max=100_000,
    kv_bytes_per_token=1_000,
    coefficients=COSTS,
    tpot_s=0.02,
    link_bytes_per_s=1e6,
)

LIMITS = StepLimits(step_tokens_max=8_192, chunk_tokens=4_096)


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 10_000, length, dtype=np.uint32)


def worker(first_rank: int, epoch: int = 1) -> WorkerId:
    return worker_id(NODE, epoch, first_rank)


DECODE = decode_worker_id(NODE, 0)


@dataclass
class World:
    """`frames` holds what the router got, `prompts` what it hands out to claims."""

    node: ModelledNode = SMALL
    queue_max: int = 8
    clock: ManualClock = field(default_factory=ManualClock)
    log: MemoryLog = field(default_factory=MemoryLog)
    frames: list[TokenFrame] = field(default_factory=list)
    prompts: dict[RequestId, Tokens] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    engines: list[ModelledEngine] = field(default_factory=list)
    step_limits: StepLimits = LIMITS
    starts: int = 0
    engine_class: type[ModelledEngine] = ModelledEngine

    def __post_init__(self) -> None:
        self.bus = MemoryBus(self.clock)
        self.ids = Ids(self.clock, random.Random(1))
        self.control = Sealer(Identity("test", Source("controller-1"), "c"), SUBJECTS, self.clock, self.ids)

    def new_agent(self) -> NodeAgent:
        """Like a restarted process: another source, nothing remembered."""
        self.starts += 1
        state = initial(NODE, self.queue_max)
        filters = (SUBJECTS.control, SUBJECTS.event(Channel.WORKERS, NODE))
        projection = Projection(self.log, filters, state, evolve)
        identity = Identity("test", Source(f"worker-{self.starts}"), NODE)
        outbox = Outbox(projection, Sealer(identity, SUBJECTS, self.clock, self.ids), self.clock)
        ports = NodePorts(
            node=NODE,
            source=identity.source,
            state=state,
            outbox=outbox,
            clock=self.clock,
            bus=self.bus,
            bulk=self.bus,
            subjects=SUBJECTS,
            metrics=WorkerMetrics(CollectorRegistry()),
            coefficients=self.node.coefficients,
            step_limits=self.step_limits,
            hung_step_s_min=5.0,
        )
        self.state = state
        return NodeAgent(ports, projection, self.new_engine)

    def new_engine(self) -> ModelledEngine:
        self.engines.append(self.engine_class(self.node, self.clock, random.Random(1)))
        return self.engines[-1]

    # --- the router and the controller

    async def listen(self) -> None:
        await self.bus.subscribe(SUBJECTS.claim(ROUTER), self._claimed)
        await self.bus.subscribe(SUBJECTS.all_frames(ROUTER), self._framed)

    async def _claimed(self, _subject: str, payload: bytes) -> bytes:
        claim = Claim.model_validate_json(payload)
        self.claims.append(claim)
        tokens = self.prompts.get(claim.request)
        return b"" if tokens is None else tokens[claim.offset : claim.offset + 65_536].astype("<u4").tobytes()

    async def _framed(self, _subject: str, payload: bytes) -> None:
        self.frames.append(TokenFrame.model_validate_json(payload))

    async def ask(self, command: Message, within_s: float = 0.0) -> Reply:
        """The agent's answer, after `within_s` of time."""
        asked = asyncio.ensure_future(self.bus.request(SUBJECTS.agent(NODE), encode_message(command), 60.0))
        await self.clock.advance(within_s)
        assert asked.done(), f"no answer to {command.model_dump()['kind']} within {within_s} s"
        return decode_reply(asked.result())

    def assignment(
        self,
        request: str,
        tokens: Tokens,
        *,
        at: WorkerId | None = None,
        attempt: int = 1,
        max_new_tokens: int = 1,
        decode: bool = False,
        **changes: object,
    ) -> Assign:
        """An `assign` whose prompt the router keeps for the claim."""
        self.prompts[RequestId(request)] = tokens
        assign = Assign(
            request=RequestId(request),
            attempt=attempt,
            router=ROUTER,
            router_source=ROUTER_SOURCE,
            worker=at or worker(0),
            decode_worker=DECODE if decode else None,
            prompt_tokens=len(tokens),
            block_ids=b"".join(block_chain(tokens, BLOCK_TOKENS, KEY)),
            max_new_tokens=max_new_tokens,
            sampling=SamplingSpec(temperature=0.0),
            service_us=len(tokens) * 1_000,
        )
        return assign.model_copy(update=changes)

    async def decide(self, *decisions: EventData) -> None:
        """Append to the control subject, as the controller does."""
        sealed = self.control.seal(decisions, NO_ORIGIN)
        await self.log.append([entry for _, entry in sealed], {})
        await self.clock.advance(0)

    async def adopt(self, epoch: int, composition: Composition, term: int = 1) -> Reply:
        """Order it and, when it was adopted, commit it."""
        order = Adopt(term=term, node=NODE, incarnation=self.state.incarnation, epoch=epoch, composition=composition)
        reply = await self.ask(order, within_s=2.0)
        if reply.kind == "accepted":
            await self.decide(committed(epoch, composition))
        return reply

    # --- what was recorded

    def events(self, *kinds: type[EventData]) -> list[EventData]:
        """Everything on the log, in order, or those of `kinds`."""
        return [each.data for each in self.envelopes() if not kinds or isinstance(each.data, kinds)]

    def envelopes(self) -> list[Envelope]:
        return [stored.event for stored in self.folded()]

    def folded(self) -> list[Stored]:
        """The log."""
        return [Stored("memory", each.seq, decode(each.payload)) for each in self.log._messages]

    def pool(self) -> Pool:
        """The pool as every service folds it."""
        pool = Pool()
        for stored in self.folded():
            pool_model.evolve(pool, stored)
        return pool

    def receipts(self) -> list[Stored]:
        """What a router would have logged of every request before it was assigned."""
        sealer = Sealer(Identity("test", Source(ROUTER_SOURCE), ROUTER_SOURCE), SUBJECTS, self.clock, self.ids)
        received = [
            RequestReceived(
                request=request,
                tenant=TenantId("t"),
                model="m",
                prompt_tokens=len(tokens),
                max_tokens=1,
                slo_us=0,
                stream=False,
                block_ids=b"".join(block_chain(tokens, BLOCK_TOKENS, KEY)),
                seen_seq=0,
            )
            for request, tokens in self.prompts.items()
        ]
        return [Stored("memory", 0, envelope) for envelope, _ in sealer.seal(received, NO_ORIGIN)]

    def of(self, request: str) -> list[TokenFrame]:
        """The frames of one request, in the order they came."""
        return [frame for frame in self.frames if frame.request == request]


def committed(epoch: int, composition: Composition, node: NodeId = NODE) -> EpochCommitted:
    workers = tuple(
        CommittedWorker(
            worker=worker_id(node, epoch, group.first_rank),
            first_rank=group.first_rank,
            degree=group.degree,
            capacity_us=1,
        )
        for group in groups_of(composition)
    )
    return EpochCommitted(node=node, epoch=epoch, composition=composition, workers=workers)


@asynccontextmanager
async def running(world: World, composition: Composition | None = (1, 1, 2)) -> AsyncIterator[NodeAgent]:
    """An agent that has registered, and serves `composition` as epoch 1."""
    await world.listen()
    agent = world.new_agent()
    await agent.start()
    await world.clock.advance(0.01)
    if composition is not None:
        assert (await world.adopt(1, composition)).kind == "accepted"
    try:
        yield agent
        check(world, agent)
    finally:
        await kill(agent)
        await world.bus.close()


def check(world: World, agent: NodeAgent) -> None:
    """Every structure agrees with itself, and nothing is kept for a job that has left."""
    world.state.desk.check()
    for engine in world.engines:
        engine.check()
    if agent._life is not None:
        needed = {job.key for job in world.state.desk if job.stage in (Stage.QUEUED, Stage.RUNNING)}
        assert agent._life[0]._claims._fetches.keys() <= needed, "tokens of a job that is past its prefill"


async def kill(agent: NodeAgent) -> None:
    """As if the process were gone: nothing is said."""
    tasks = [*agent._tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    agent._ports.outbox._publisher.cancel()  # type: ignore[union-attr]
    await agent.projection.stop()
