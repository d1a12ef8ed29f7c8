"""What an engine makes of a switch, against the plug-in's protocol in memory (`test_verbs`)."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from services.worker.engine.protocol import EngineDied, EngineError, RolledBack
from services.worker.engine.sglang import adaptive
from services.worker.engine.sglang.adaptive import AdaptiveGeometry
from services.worker.engine.sglang.engine import SglangEngine
from services.worker.engine.sglang.kv_messages import AllBlocksCleared, BlockStored, Message
from services.worker.engine.sglang.plugin.wire import Commit, Evict, Prepare, Release
from services.worker.engine.sglang.settings import ServerAddress, SglangSettings
from shared.model.lattice import Group
from tests.services.worker.engine.sglang.test_verbs import SAME, Server, SkippingClock
from tests.support.tiny_models import write_tiny_model


class Told:
    """The server's protocol, and the units' events: a merge publishes them with its commit."""

    def __init__(self, engine: SglangEngine, server: Server) -> None:
        self.engine, self.server = engine, server
        self.publishes = True
        self.units = engine._fleet.units

    def answer(self, request: httpx.Request) -> httpx.Response:
        response = self.server.answer(request)
        if self.server.seen and isinstance(self.server.seen[-1], Commit) and self.publishes:
            for unit in self.units:
                kept = BlockStored(sorted(unit.held & {1, 2}), None, 16, "GPU")
                unit.fold(Message(unit.next_sequence or 0, [AllBlocksCleared(), kept]))
            self.engine._wake()
        return response


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Told]:
    settings = SglangSettings(
        model_dir=write_tiny_model(tmp_path / "tiny", "qwen3"),
        servers=(ServerAddress(url="http://gpus:1", degree=4),),
        decode=(),
        adaptive=True,
        block_tokens=16,
        blocks_per_rank=100,
        context_tokens_max=512,
        silence_s=60.0,
        start_limit_s=60.0,
    )
    engine = SglangEngine(settings, SkippingClock(), random.Random(1))
    assert (engine.describe().degrees, engine.describe().evicts) == ((1, 2, 4), True)
    told = Told(engine, Server())
    for unit in told.units:
        unit.fold(Message(0, [BlockStored([1, 2, 3], None, 16, "GPU")]))
    http = httpx.AsyncClient(base_url="http://gpus:1", transport=httpx.MockTransport(told.answer))
    geometry = engine._geometry
    assert isinstance(geometry, AdaptiveGeometry)
    geometry._verbs._http = http
    await geometry.start()
    yield told
    await http.aclose()
    await engine.close()


async def test_what_is_served_needs_no_switch(told: Told) -> None:
    ranks = await told.engine._geometry.adopt((1, 1, 1, 1))
    assert [(each.rank, each.seconds) for each in ranks] == [(rank, 0.0) for rank in range(4)]
    assert told.server.seen == []


async def test_a_merge_is_over_when_its_events_are_here(told: Told) -> None:
    assert len(await told.engine._geometry.adopt((2, 1, 1))) == 4
    assert [unit.held for unit in told.units[:2]] == [{1, 2}, {1, 2}]
    prepared = [verb for verb in told.server.seen if isinstance(verb, Prepare)]
    assert [verb.composition for verb in prepared] == [(2, 1, 1)]


async def test_a_split_waits_for_no_events(told: Told) -> None:
    await told.engine._geometry.adopt((4,))
    told.publishes = False
    await told.engine._geometry.adopt((2, 2))
    await told.engine._geometry.adopt((2, 1, 1))
    epochs = [verb.epoch for verb in told.server.seen if isinstance(verb, Commit)]
    assert epochs == sorted(set(epochs)), "each switch has a number of its own"


async def test_a_merge_without_events_leaves_nothing_that_is_believed(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "RESYNC_LIMIT_S", 0.01)
    told.publishes = False
    await told.engine._geometry.adopt((4,))
    assert [unit.held for unit in told.units] == [set()] * 4


async def test_a_switch_that_is_voted_down_rolls_back_and_may_be_asked_for_again(told: Told) -> None:
    told.server.votes = False
    with pytest.raises(RolledBack, match=r"voted against it; \(1, 1, 1, 1\) is served on"):
        await told.engine._geometry.adopt((4,))
    told.server.votes = True
    await told.engine._geometry.adopt((4,))
    assert told.server.composition == (4,)


async def test_a_server_that_does_not_say_what_became_of_it_is_given_up(told: Told) -> None:
    told.server.silent = Commit
    with pytest.raises(EngineDied):
        await told.engine._geometry.adopt((4,))
    assert not told.engine.health().ok
    assert await asyncio.wait_for(told.engine.wait_died(), 30)


@pytest.mark.parametrize("votes", [True, False])
async def test_a_server_that_somebody_else_switches_too_is_given_up(told: Told, votes: bool) -> None:
    """What the pool believes of its workers would be wrong from then on."""

    class Shared(Server):
        def answer(self, request: httpx.Request) -> httpx.Response:
            if self.seen and isinstance(self.seen[-1], Release):
                self.composition = (2, 2)
            return super().answer(request)

    told.server = Shared(votes=votes)
    with pytest.raises(EngineDied, match=r"serves \(2, 2\) instead of .*: somebody else switches it"):
        await told.engine._geometry.adopt((4,))
    assert not told.engine.health().ok


async def test_pages_are_taken_out_in_as_many_verbs_as_it_takes(told: Told) -> None:
    assert await told.engine._geometry.take_out(Group(1, 1), list(range(100)))
    sent = [verb for verb in told.server.seen if isinstance(verb, Evict)]
    assert [page for verb in sent for page in verb.blocks] == list(range(100))
    assert {verb.units for verb in sent} == {0b0010}
    told.server.silent = Evict
    with pytest.raises(EngineError, match="evict"):
        await told.engine._geometry.take_out(Group(1, 1), [1])


@pytest.mark.parametrize(
    ("host", "pid", "watched"),
    [("127.0.0.1", os.getpid(), True), ("127.0.0.1", 2**30, False), ("gpus", os.getpid(), False)],
    ids=["seen", "of another container", "on another machine"],
)
async def test_only_processes_that_can_be_seen_are_watched(
    told: Told, monkeypatch: pytest.MonkeyPatch, host: str, pid: int, watched: bool
) -> None:
    """A local server may run in another container, where its processes have other numbers."""
    monkeypatch.setitem(SAME, "pid", pid)
    geometry = told.engine._geometry
    assert isinstance(geometry, AdaptiveGeometry)
    geometry._settings = replace(geometry._settings, servers=(ServerAddress(url=f"http://{host}:1", degree=4),))
    await geometry.start()
    assert list(told.engine._fleet._pids.values()) == ([[pid] * 4] if watched else [])
