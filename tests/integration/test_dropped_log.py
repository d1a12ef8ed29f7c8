"""A pool whose log drops its beginning, and one whose log is lost: real processes on a real NATS server, none of them told."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.js import JetStreamContext

from cli.embedded.nats import EmbeddedNats
from shared.contracts.events import (
    CacheLeadershipTaken,
    CacheReported,
    CacheScanCompleted,
    EpochCommitted,
    LeadershipTaken,
    NodeRegistered,
    ParametersChanged,
    RequestAssigned,
    RouterLost,
    RouterRegistered,
    WindowClosed,
)
from shared.contracts.subjects import Subjects
from shared.runtime.keepsake import recall
from tests.services.router.router_pool import MODEL, RouterPool
from tests.support.every_service import every_service_folds_every_end_of
from tests.support.replica import Replica, Witness, eventually, witness

PROMPT = [5, 6, 7, 8] * 100
SUBJECTS = Subjects("main")
BETA = 4.0


class System:
    """Two nodes, n1 cordoned; two routers, of which the second is not started; windows of a second."""

    def __init__(self, server: EmbeddedNats, directory: Path) -> None:
        self.server = server
        self.changes = 1
        """The one that opened the pool."""
        self.pool = RouterPool(server, directory, nodes=2)
        self.cachemgr = Replica("cachemgr", server, directory)
        key = str(directory / "block.key")
        self.second = Replica("router", server, directory, "2", VERTUMNUS_SPEEDUP="100", VERTUMNUS_BLOCK_KEY_FILE=key)

    @property
    def running(self) -> tuple[Replica, ...]:
        return (self.pool.controller, self.cachemgr, self.pool.worker, self.pool.router)

    async def ask(self, replica: Replica) -> None:
        """A request for what every other one asks, which has to be answered."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        async with httpx.AsyncClient(base_url=replica.url, timeout=60) as http:
            answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text

    async def operate(self, what: str, **of: Any) -> None:
        async with httpx.AsyncClient(base_url=self.pool.controller.url, timeout=10) as http:
            answer = await http.post(f"/v1/operator/{what}", json={"asked_by": "me", **of})
        assert answer.status_code == 200, answer.text

    async def serve(self) -> None:
        """From the first start to a pool that has served, was changed and is kept."""
        self.cachemgr.start()
        await asyncio.to_thread(self.pool.start)
        await eventually(self.cachemgr.ready)
        for _ in range(2):
            await self.ask(self.pool.router)
        self.changes += 1
        policies = {"placement_policy": "paper", "reconfiguration_policy": "off"}
        await self.operate("parameters", changes={"beta": BETA, "window_s": 1, **policies})
        await self.operate("cordon", node="n1")

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[JetStreamContext]:
        client = await nats.connect(self.server.url)
        try:
            yield client.jetstream()
        finally:
            await client.close()

    async def drop_everything(self, seeing: Witness) -> None:
        """All but what happened since the bucket was written, as a log of two days does."""
        # Any change is written at once, and with it how far everything has been folded.
        self.changes += 1
        await self.operate("parameters", changes={"long_tokens": 30_000 + self.changes})
        await eventually(lambda: len(seeing.all(ParametersChanged)) == self.changes)
        changed_seq = max(each.stream_seq for each in seeing.events if isinstance(each.data, ParametersChanged))
        keepsake, log = seeing.runtime.keepsake, seeing.runtime.log
        while (kept := await recall(keepsake, log.identity)).seen_seq < changed_seq:  # noqa: ASYNC110 - a bucket tells nobody
            await asyncio.sleep(0.1)
        async with self.stream() as stream:
            await stream.purge_stream(SUBJECTS.stream, seq=kept.seen_seq + 1)

    async def restart(self, replica: Replica) -> None:
        replica.stop(kill=True)
        replica.start()
        await eventually(replica.ready, within_s=40)


@pytest.fixture
def system(nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[System]:
    system = System(nats_server, tmp_path)
    try:
        yield system
    finally:
        for each in (system.second, *system.running):
            each.stop(kill=True)


async def test_every_service_starts_on_a_log_without_its_beginning(system: System) -> None:
    async with witness(system.server) as seeing:
        await system.serve()
        commits = len(seeing.all(EpochCommitted))
        assert commits == 2

        await system.drop_everything(seeing)
        await a_new_router_serves_and_prices_with_exact_caches(system, seeing)
        await system.drop_everything(seeing)
        await a_new_cache_manager_learns_the_caches(system, seeing)
        await system.drop_everything(seeing)
        await a_new_controller_goes_on_where_the_old_one_was(system, seeing)
        await system.drop_everything(seeing)
        await a_restarted_agent_is_the_next_incarnation(system, seeing)
        await system.ask(system.second)

        assert len(seeing.all(EpochCommitted)) == commits, "no node was given an epoch again"
        every_service_folds_every_end_of(seeing.events)


async def a_new_router_serves_and_prices_with_exact_caches(system: System, seeing: Witness) -> None:
    system.second.start()
    await eventually(system.second.ready, within_s=40)
    before = len(seeing.all(RequestAssigned))

    def assigned() -> list[Any]:
        return seeing.all(RequestAssigned)[before:]

    for _ in range(20):
        await system.ask(system.second)
        await eventually(assigned)
        if {each.trust for each in assigned()[-1].candidates} == {"exact"} and assigned()[-1].cached_tokens:
            break
        await asyncio.sleep(0.3)
    first, last = assigned()[0], assigned()[-1]
    assert (first.beta, first.parameters_version, first.excluded) == (BETA, system.changes, {"cordoned": 4})
    assert ({each.trust for each in last.candidates}, last.cached_tokens > 0) == ({"exact"}, True)
    assert seeing.all(CacheReported), "it has asked for itself: the cache manager knew the caches"


async def a_new_cache_manager_learns_the_caches(system: System, seeing: Witness) -> None:
    scans, terms = len(seeing.all(CacheScanCompleted)), [each.term for each in seeing.all(CacheLeadershipTaken)]
    await system.restart(system.cachemgr)
    await eventually(lambda: any(each.holders for each in seeing.all(CacheScanCompleted)[scans:]))
    assert seeing.all(CacheLeadershipTaken)[-1].term > max(terms)
    numbers = [each.scan for each in seeing.all(CacheScanCompleted)]
    assert numbers == sorted(set(numbers)), "scans are numbered on"


async def a_new_controller_goes_on_where_the_old_one_was(system: System, seeing: Witness) -> None:
    terms, windows = [each.term for each in seeing.all(LeadershipTaken)], len(seeing.all(WindowClosed))
    await system.restart(system.pool.controller)
    await eventually(lambda: len(seeing.all(WindowClosed)) >= windows + 2)
    assert seeing.all(LeadershipTaken)[-1].term > max(terms)
    assert [each.k for each in seeing.all(WindowClosed)] == list(range(1, len(seeing.all(WindowClosed)) + 1))

    first = next(each.event.source for each in seeing.events if isinstance(each.data, RouterRegistered))
    system.pool.router.stop(kill=True)
    await eventually(lambda: [each.source for each in seeing.all(RouterLost)] == [first])


async def a_restarted_agent_is_the_next_incarnation(system: System, seeing: Witness) -> None:
    system.pool.worker.stop(kill=True)
    system.pool.worker.start()
    await eventually(lambda: len(seeing.all(NodeRegistered)) == 4, within_s=40)
    again = {each.node: (each.incarnation, each.epoch, each.composition) for each in seeing.all(NodeRegistered)[2:]}
    assert again == {"n0": (2, 1, (1, 1, 2, 4)), "n1": (2, 1, (1, 1, 2, 4))}
    await eventually(system.second.ready)


async def test_a_lost_log_takes_neither_epochs_nor_parameters_nor_cordons_with_it(system: System) -> None:
    async with witness(system.server) as seeing:
        await system.serve()
        await system.drop_everything(seeing)
    for each in system.running:
        each.stop(kill=True)
    async with system.stream() as stream:
        await stream.delete_stream(SUBJECTS.stream)
    async with witness(system.server) as seeing:
        for each in system.running:
            each.start()
        await eventually(lambda: len(seeing.all(NodeRegistered)) == 2, within_s=40)
        assert {(each.incarnation, each.epoch) for each in seeing.all(NodeRegistered)} == {(2, 1)}
        await eventually(system.pool.router.ready)
        await system.ask(system.pool.router)
        await eventually(lambda: seeing.all(RequestAssigned))
        assigned = seeing.all(RequestAssigned)[-1]
        assert (assigned.beta, assigned.parameters_version, assigned.excluded) == (
            BETA,
            system.changes,
            {"cordoned": 4},
        )
        assert {each.trust for each in assigned.candidates} == {"exact"}, "new incarnations are empty"
        await eventually(lambda: seeing.all(WindowClosed))
        assert not seeing.all(EpochCommitted)
        every_service_folds_every_end_of(seeing.events)
