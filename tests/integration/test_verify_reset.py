"""The stream is lost and made anew while its record is being verified."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import nats
import pytest

from cli.embedded.nats import EmbeddedNats
from replay.findings import RECORDED_INPUTS
from replay.verification import Verification, verify
from shared.contracts.codec import encode
from shared.contracts.envelope import Channel
from shared.contracts.events import RequestAssigned
from shared.contracts.ids import node_of
from shared.contracts.subjects import Subjects
from shared.runtime.appending import append_once
from shared.runtime.ports import APPEND_ENTRIES_MAX, Entry
from tests.integration.ledger_rig import LedgerRig
from tests.replay.lagging_world import World
from tests.support.replica import eventually

LIMIT_S = 120.0
"""For what does not come at all."""

PAGE_EVENTS = 100


@pytest.fixture
def rig(nats_server: EmbeddedNats, record_url: str, tmp_path: Path) -> Iterator[LedgerRig]:
    made = LedgerRig(nats_server, record_url, tmp_path)
    yield made
    made.stop()


async def publish(rig: LedgerRig, world: World) -> None:
    """The whole life of a pool, in a stream that is new."""
    async with rig.runtime() as runtime:
        entries = []
        for event in (each.event for each in world.log):
            sender: str = event.source
            if event.data.CHANNEL in (Channel.WORKERS, Channel.CACHE):
                sender = getattr(event.data, "node", None) or node_of(event.data.worker)
            subject = runtime.subjects.event(event.data.CHANNEL, sender)
            entries.append(Entry(subject, event.id, event.type, encode(event)))
        for begin in range(0, len(entries), APPEND_ENTRIES_MAX):
            last = await append_once(runtime.log, entries[begin : begin + APPEND_ENTRIES_MAX], {}, runtime.clock)
        assert last == len(world.log), "what decisions have seen is where it was"


async def test_what_is_verified_is_the_log_that_was_there_when_it_began(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.ledger.reading.PAGE_EVENTS", PAGE_EVENTS)
    first, second = World(1), World(2, life=2)
    for world in (first, second):
        world.run(400)
    await publish(rig, first)
    ledger = rig.ledger()
    ledger.start()
    await rig.until_copied(len(first.log))
    before = await verify(rig.url, jobs=1)
    assert before.clean
    has_begun, may_go_on = Event(), Event()

    def wait(_: int) -> None:
        has_begun.set()
        assert may_go_on.wait(LIMIT_S)

    def verify_meanwhile() -> Verification:
        return asyncio.run(verify(rig.url, jobs=1, progress=wait))

    verifying = asyncio.create_task(asyncio.to_thread(verify_meanwhile))
    try:
        assert await asyncio.to_thread(has_begun.wait, LIMIT_S)
        client = await nats.connect(rig.nats.url)
        await client.jetstream().delete_stream(Subjects("main").stream)
        await client.close()
        await eventually(lambda: ledger.exit_status() is not None)
        await publish(rig, second)
        ledger.stop()
        ledger.start()
        await rig.until_copied(len(second.log), log_number=2)
    finally:
        may_go_on.set()
    assert await verifying == before, "all of the old log, and nothing of the new one"
    both = await verify(rig.url, new=True, jobs=1)
    assert both.logs == 2
    assert not both.findings.differences
    assert not both.findings.skipped
    for kind in (RequestAssigned.TYPE, RECORDED_INPUTS):
        placed = [each for world in (first, second) for each in world.log if isinstance(each.data, RequestAssigned)]
        assert both.findings.checked[kind] == len(placed) > before.findings.checked[kind]
