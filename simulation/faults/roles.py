"""The services, hosted as their `__main__` does, without HTTP. What a role offers to the world is a `Service`."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cachemgr import hosting as cachemgr
from services.cachemgr.settings import CacheManagerSettings
from services.controller import hosting as controller
from services.controller.decider import initial, take_leadership
from services.controller.settings import ControllerSettings
from services.router import hosting as router
from services.router.settings import RouterSettings
from services.worker import hosting as worker
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import Engine
from services.worker.engines import engines
from services.worker.settings import WorkerSettings
from shared.contracts.ids import NodeId
from shared.runtime.appending import NO_ORIGIN
from shared.runtime.process_copy import Told, Work
from shared.runtime.settings import ServiceSettings
from simulation.faults.process import Outside, Process
from simulation.faults.scenario import Shape
from simulation.scoring import InlineScorer

POOL = "main"
BLOCK_TOKENS = 16
VOCABULARY = 4_000
STOP_S_MAX = 3.0
SNAPSHOT_EVERY_S = 2.0
"""So often that whoever is killed has left one, and goes on from it."""

NOT_A_SECRET = Path(__file__)
"""A simulated deployment's key for block ids: any file that is long enough."""


async def _nothing() -> None:
    return None


@dataclass(slots=True)
class Service:
    """A role at work. `hosted` is what its service's `host` gave; the first of `failures` that returns ends the process."""

    hosted: object
    failures: Sequence[Awaitable[Exception]]
    stop: Callable[[], Coroutine[Any, Any, None]] = _nothing
    engines: list[ModelledEngine] = field(default_factory=list)
    """Of a worker, one for each life of its node; the last is the one that runs."""


async def host(process: Process, shape: Shape) -> Service:
    """Start what the process is for. Errors: those of the service's own `host`."""
    kind, _, rest = process.name.partition("-")
    match kind:
        case "router":
            return await _router(process)
        case "controller":
            return await _controller(process, shape)
        case "cachemgr":
            return await _cachemgr(process)
        case "worker":
            return await _worker(process, shape, NodeId(rest))
        case _:
            raise AssertionError(f"no role is called {process.name}")


async def led_before(outside: Outside) -> None:
    """The log of a pool that an older version has led, which knew nothing to open one with."""
    past = Process("controller-0", 0, outside, 0)
    first = take_leadership(initial(), past.source, 1)
    [(_, taken)] = past.runtime(ServiceSettings(pool=POOL)).sealer(past.source).seal([first], NO_ORIGIN)
    await outside.log.append([taken], {})


async def _router(process: Process) -> Service:
    settings = RouterSettings(pool=POOL, block_key_file=NOT_A_SECRET, drain_s=STOP_S_MAX, first_token_slack_s=5.0)
    hosted = await router.host(settings, process.runtime(settings))

    async def stop() -> None:
        await hosted.dispatcher.drain()
        await hosted.outbox.stop()

    return Service(hosted, hosted.failures, stop)


async def _controller(process: Process, shape: Shape) -> Service:
    compositions = {NodeId(node): each for node, each in zip(shape.nodes, shape.compositions, strict=True)}
    settings = ControllerSettings(pool=POOL, compositions=compositions)
    hosted = await controller.host(settings, process.runtime(settings), InlineScorer())
    return Service(hosted, hosted.failures, hosted.controller.stop)


async def _cachemgr(process: Process) -> Service:
    settings = CacheManagerSettings(pool=POOL, snapshot_every_s=SNAPSHOT_EVERY_S)
    hosted = await cachemgr.host(settings, process.runtime(settings), _here)
    return Service(hosted, hosted.failures, hosted.stop)


def _here(work: Work) -> Told:
    """At once, in the one process that there is."""

    async def told(pieces: list[bytes]) -> AsyncGenerator[bytes, None]:
        for each in pieces:
            yield each

    return told(list(work()))


async def _worker(process: Process, shape: Shape, node: NodeId) -> Service:
    settings = WorkerSettings(
        pool=POOL,
        engine="modelled",
        node=node,
        prefill_ranks=sum(shape.compositions[shape.nodes.index(node)]),
        decode_ranks=shape.decode_ranks,
        block_tokens=BLOCK_TOKENS,
        blocks_per_rank=shape.blocks_per_rank,
        context_tokens_max=2_048,
        step_tokens_max=128,
        chunk_tokens=64,
        queue_max=shape.queue_max,
        hung_step_s_min=4.0,
        stop_s_max=STOP_S_MAX,
        modelled_vocabulary=VOCABULARY,
        noise_sd=0.1,
        tpot_s=0.02,
    )
    made: list[ModelledEngine] = []
    with engines(settings, process.engine_clock) as make_engine:

        def make(name: NodeId) -> Engine:
            engine = make_engine(name)
            assert isinstance(engine, ModelledEngine), "the settings ask for a modelled engine"
            engine.lose_copies(process.loses_copies)
            made.append(engine)
            return engine

        agent = worker.host(settings, process.runtime(settings), make)[0]
        await agent.start()
    return Service(agent, [agent.failed()], lambda: agent.stop(settings.stop_s_max), made)
