"""When a decode server is given up, and when the engine with it: probes of a local server (`replaying`), one at a time."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.fleet import Fleet
from services.worker.engine.sglang.health import UNANSWERED_MAX
from services.worker.engine.sglang.settings import DecodeAddress, ServerAddress, SglangSettings
from shared.runtime.clock import SystemClock
from tests.services.worker.engine.sglang.replaying import Replay, replaying
from tests.support.tiny_models import write_tiny_model


class Beats(SystemClock):
    """Whoever sleeps is woken by a beat."""

    def __init__(self) -> None:
        self.beats = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        await self.beats.acquire()


class Watched:
    """An only decode server."""

    def __init__(self, fleet: Fleet, clock: Beats, server: Replay) -> None:
        self.fleet, self.server = fleet, server
        self._clock, self._gone = clock, set[int]()
        fleet.spawn(fleet._watch_decode(0, fleet.decode[0], self._gone))

    async def probe(self, *, well: bool) -> None:
        """One of it, to its end."""
        self.server.well, before = well, len(self.server.probed)
        self._clock.beats.release()
        for _ in range(6_000):
            if len(self.server.probed) > before and self.fleet.down[0] != well:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("no probe comes")


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    model = write_tiny_model(tmp_path / "tiny-qwen3", "qwen3")
    async with replaying() as server:
        settings = SglangSettings(
            model_dir=model,
            servers=(ServerAddress(url="http://n:1", degree=1, bootstrap_port=8998),),
            decode=(DecodeAddress(url=server.url),),
            adaptive=False,
            block_tokens=16,
            blocks_per_rank=300,
            context_tokens_max=512,
            silence_s=60.0,
        )
        clock = Beats()
        engine = SglangEngine(settings, clock, random.Random(1))
        yield Watched(engine._fleet, clock, server)
        await engine.close()


async def test_an_only_decode_server_may_miss_a_probe(watched: Watched) -> None:
    for _ in range(UNANSWERED_MAX - 1):
        await watched.probe(well=False)
    assert not watched.fleet.lost.done()
    await watched.probe(well=True)
    await watched.probe(well=False)
    assert not watched.fleet.lost.done()


async def test_the_engine_ends_with_the_last_one_that_is_given_up(watched: Watched) -> None:
    for _ in range(UNANSWERED_MAX):
        await watched.probe(well=False)
    assert "no decode server answers" in await asyncio.wait_for(watched.fleet.lost, 30)
