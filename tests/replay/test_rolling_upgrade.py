"""While some services are newer than others the log has events that the older ones do not know."""

from replay.explaining import explain
from replay.instants import Instant, states
from replay.verification import verify
from services.ledger.audit import audit
from services.ledger.rebuild import rebuild
from tests.replay.conftest import arrivals
from tests.replay.lagging_world import World
from tests.services.ledger.record_writer import RecordWriter, tables


async def test_events_of_tomorrow_are_recorded_and_skipped_by_every_fold(writer: RecordWriter) -> None:
    world, times = World(3), 30
    for _ in range(times):
        world.run(20)
        world.store_of_tomorrow()
    await writer.write(arrivals(world.log))
    found = await audit(writer.url)
    assert found.violations == []
    assert found.by_type["request-teleported"] == times
    verified = await verify(writer.url)
    assert verified.clean, verified.findings.differences
    assert not verified.findings.skipped
    assert verified.findings.checked["request-assigned"] > 50
    told = (await states(writer.url, [Instant(len(world.log), True)]))[0]
    assert told["place"]["stream_seq"] == len(world.log), "the last event is one of tomorrow"
    assert "request-teleported" in [each.event.type for each in (await explain(writer.url, "r1")).events]
    live = await tables(writer.connection)
    await rebuild(writer.url)
    assert await tables(writer.connection) == live
