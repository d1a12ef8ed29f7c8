"""The engine to be profiled: the one that a worker with the same settings would drive.

A modelled engine runs in virtual time: an hour of modelled prefills takes a moment, and is as long as the model says.
"""

import asyncio
import os
import platform
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from cli.profiling.document import Circumstances
from cli.profiling.grid import Limits
from services.worker.engine.protocol import Engine, EngineDescription
from services.worker.engines import engines
from services.worker.settings import WorkerSettings
from shared.contracts.ids import NodeId
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.memory import ManualClock

VIRTUAL_DAY_S = 86_400.0

_T = TypeVar("_T")


class Node(NamedTuple):
    """A started engine, the clock that its time passes on, and how many ids its vocabulary has."""

    engine: Engine
    clock: Clock
    vocabulary: int

    @property
    def limits(self) -> Limits:
        return limits_of(self.engine.describe())


def limits_of(description: EngineDescription) -> Limits:
    """What bounds the grid."""
    return Limits(
        description.degrees, description.prompt_tokens_max, description.blocks_per_rank, description.block_tokens
    )


def machine() -> str:
    """The processor as Linux names it, and how many of them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} × {names[0] if names else platform.machine()}"


def circumstances(node: Node) -> Circumstances:
    """Where and of what a measurement is made that ends now."""
    described = node.engine.describe()
    return Circumstances(
        made_at=datetime.fromtimestamp(SystemClock().now_ns() // 10**9, UTC),
        code=version("vertumnus"),
        engine=described.engine,
        model=described.model,
        model_revision=described.model_revision,
        device=described.device,
        machine=machine(),
    )


def run_on_node(
    settings: WorkerSettings,
    work: Callable[[Node], Coroutine[Any, Any, _T]],
    foreseen: Callable[[Limits], object] = lambda _limits: None,
) -> _T:
    """Start the engine, do the work, end the engine. `foreseen` raises what the limits will not let it do, before the start,
    which takes minutes for a large model. Errors: EngineError names what is missing or unsupported."""
    clock = ManualClock() if settings.engine == "modelled" else SystemClock()

    async def whole() -> _T:
        async with _started(settings, clock, foreseen) as node:
            doing = work(node)
            return await (in_virtual_time(clock, doing) if isinstance(clock, ManualClock) else doing)

    with _logs_on_stderr():
        return asyncio.run(whole())


@contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """An engine logs what it loads, and standard output is for whoever asked for JSON."""
    before = structlog.get_config()
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(**before)


async def in_virtual_time(clock: ManualClock, work: Awaitable[_T]) -> _T:
    """The work's result; time passes as fast as nobody waits for anything but time."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(VIRTUAL_DAY_S)
    return task.result()


@asynccontextmanager
async def _started(settings: WorkerSettings, clock: Clock, foreseen: Callable[[Limits], object]) -> AsyncIterator[Node]:
    with engines(settings, clock) as make:
        engine = make(NodeId("profile"))
        try:
            foreseen(limits_of(engine.describe()))
            await engine.start()
            yield Node(engine, clock, _vocabulary(settings))
        finally:
            await engine.close()


def _vocabulary(settings: WorkerSettings) -> int:
    if settings.engine == "modelled":
        return settings.modelled_vocabulary
    assert settings.model_dir is not None, "the settings have checked it"
    if settings.engine == "sglang":
        from services.worker.engine.sglang.model_facts import read_model

        return read_model(settings.model_dir).vocabulary
    from services.worker.engine.torch.model_config import read_config

    return read_config(settings.model_dir).vocab
