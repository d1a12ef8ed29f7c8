"""A snapshot is the state of its place, and what is folded from it is what is folded from the beginning."""

from bench.ledger_traffic import Traffic
from services.ledger import snapshots
from services.ledger.loading import load
from services.ledger.patches import Place
from services.ledger.rebuild import rebuild
from services.ledger.records import BIGINT_MAX, Arrival
from services.ledger.seals import extent, seal
from tests.services.ledger.conftest import Seals, story
from tests.services.ledger.record_writer import RecordWriter, tables
from tests.services.ledger.test_audit import Sealed
from tests.services.ledger.test_ledger_readmodels import eventful, told_by


def later(seals: Seals, name: str) -> list[Arrival]:
    """Requests of a pool that runs."""
    traffic = Traffic(9, name)
    return seals.arrivals(told for _ in range(20) for told in traffic.request())


async def keep(writer: RecordWriter, now_ns: int = BIGINT_MAX) -> Place:
    """A snapshot of now, as the notary takes one; without `now_ns` no sender's clock is ahead of the ledger's."""
    async with writer.connection.transaction(isolation="repeatable_read"):
        reached = await extent(writer.connection)
        assert reached is not None
        await snapshots.take(writer.connection, reached, now_ns)
    return Place(writer.checkpoint.number, writer.checkpoint.stream_seq)


async def test_a_snapshot_loads_as_the_state_that_was_there(writer: RecordWriter, seals: Seals) -> None:
    arrivals = seals.arrivals(eventful())
    then = {}
    for begin in range(0, len(arrivals), 40):
        await writer.write(arrivals[begin : begin + 40])
        place = await keep(writer)
        assert place == await keep(writer), "a second one of the same place is the same"
        then[place] = told_by(await load(writer.connection))
    assert len(then) > 5
    for place, told in then.items():
        found = await load(writer.connection, place)
        found.check()
        assert told_by(found) == told
    assert await snapshots.before_seq(writer.connection, Place(1, 119)) == Place(1, 80)
    assert await snapshots.before_seq(writer.connection, Place(1, 39)) is None
    assert await snapshots.before_seq(writer.connection, Place(2, 1)) == max(then)
    newest_ns = await writer.connection.fetchval("SELECT max(time_ns) FROM decisions")
    assert await snapshots.before_time(writer.connection, newest_ns) == max(then)
    assert await snapshots.before_time(writer.connection, 0) is None


async def test_old_snapshots_are_thinned_to_one_of_a_day(writer: RecordWriter, seals: Seals) -> None:
    day_ns = 86_400 * 10**9
    old = [(1, day * 10 + each, day * day_ns + each) for day in range(1, 500) for each in range(3)]
    await writer.connection.executemany("INSERT INTO snapshots (log, stream_seq, time_ns) VALUES ($1, $2, $3)", old)
    await writer.write(story(seals, 3))
    last = await keep(writer)
    kept = [
        tuple(row) for row in await writer.connection.fetch("SELECT log, stream_seq, time_ns FROM snapshots ORDER BY 2")
    ]
    assert last in [each[:2] for each in kept]
    assert len(kept) <= snapshots.DAYS_KEPT + snapshots.NEWEST_KEPT + 1
    assert set(old[1 - snapshots.NEWEST_KEPT :]) <= set(kept)
    assert {each[1] % 10 for each in kept if each[:2] != last and each[1] < 4000} == {0}, "the first of each day"


async def test_a_rebuild_after_a_day_has_gone_gives_the_same_bytes(writer: RecordWriter, seals: Seals) -> None:
    record = Sealed(writer, seals)
    await record.write()
    await writer.write(later(seals, "before"))
    await keep(writer)
    await record.say(await seal(writer.connection, await record.reached()))
    await record.say(await record.said_to_go())
    await record.drop()
    await writer.write(later(seals, "after"))
    live = await tables(writer.connection)
    assert sum(row["blocks"] for row in live["caches"])
    await rebuild(writer.url)
    rebuilt = await tables(writer.connection)
    for table, rows in live.items():
        assert rebuilt[table] == rows, f"{table} differs from what was there"
    await writer.connection.execute("DELETE FROM snapshots")
    await rebuild(writer.url)
    found = await tables(writer.connection)
    assert {table for table in live if found[table] != live[table]} == {"caches", "cached_runs"}, (
        "nobody knows what it was"
    )
