"""What holds when one of three servers dies: the one that leads the stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from shared.contracts.envelope import Envelope
from shared.runtime.nats_log import NatsLog, open_log
from shared.runtime.ports import Unavailable
from shared.runtime.settings import ServiceSettings
from tests.runtime.cluster import Cluster
from tests.runtime.conftest import CLOCK, SUBJECTS, NatsClient
from tests.runtime.reading import until
from tests.runtime.test_nats_faults import write_for
from tests.runtime.writing import contents, follower, outbox

ELECTION_LIMIT_S = 30.0
"""An election takes about 6 s; the design allows 15 on a machine that has nothing else to do."""


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as exits:
        yield exits


async def replicated_log(client: NatsClient) -> NatsLog:
    """The log, once the servers have found together: a service ends with Unavailable until then, and is started again."""
    settings = ServiceSettings(stream_replicas=3, stream_bytes_max=2**26)
    while True:
        try:
            return await open_log(await client.link(), SUBJECTS, settings, CLOCK, client.ids)
        except Unavailable:
            await asyncio.sleep(0.2)


async def test_the_death_of_the_streams_leader_loses_and_repeats_nothing(tmp_path: Path, stack: AsyncExitStack) -> None:
    with Cluster(tmp_path) as cluster:
        client = NatsClient(cluster.url, stack)
        log = await replicated_log(client)
        out = await outbox(log, "router-1", CLOCK)
        observer = follower(await replicated_log(client))
        await observer.start()
        written: list[Envelope] = []
        await write_for(out, 0.5, written)
        info = await log._js.stream_info(SUBJECTS.stream)
        assert info.cluster is not None
        assert info.cluster.leader is not None
        cluster.kill(int(info.cluster.leader.removeprefix("n")))
        await write_for(out, 0.5, written)
        await until(lambda: out.events == 0, ELECTION_LIMIT_S)
        await write_for(out, 0.2, written)
        await asyncio.wait_for(out.stored(written[-1]), 60)
        assert await contents(log) == written
        await asyncio.wait_for(observer.folded(len(written)), 60)
        assert observer.state == written
        for each in (observer, out, out._projection):
            await each.stop()
