"""A record goes into a file and comes out of it in another database as it was, or not at all."""

import gzip
import io
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from bench.ledger_traffic import Traffic
from services.ledger import bundles, database, logbook
from services.ledger.audit import audit
from services.ledger.bundles import BadBundle, BundleReader, BundleWriter, Frame, LogEnds, Row
from services.ledger.database import driver_url
from services.ledger.exporting import NotExported, export
from services.ledger.feed import Gap
from services.ledger.importing import NotEmpty, import_bundle
from services.ledger.rebuild import LedgerActive
from services.ledger.records import Arrival
from tests.services.ledger.conftest import Seals, story
from tests.services.ledger.record_writer import RecordWriter, tables
from tests.services.ledger.test_audit import Sealed

LOG_TABLES = ("logs", "checkpoints", "gaps", "decisions", "block_events", "repeats")


async def bundle(url: str, **cut: int) -> bytes:
    file = io.BytesIO()
    await export(url, file, **cut)
    return file.getvalue()


def later(seals: Seals) -> list[Arrival]:
    """Requests of a pool that runs."""
    traffic = Traffic(9, "later")
    return seals.arrivals(told for _ in range(20) for told in traffic.request())


async def everything(url: str) -> dict[str, Any]:
    """Every row of the record and of its read models."""
    connection = await database.connect(url)
    try:
        rows = {name: await connection.fetch(f"SELECT * FROM {name} ORDER BY 1, 2, 3") for name in LOG_TABLES}
        return {name: [dict(row) for row in found] for name, found in rows.items()} | await tables(connection)
    finally:
        await connection.close()


async def is_empty(url: str) -> bool:
    return not any((await everything(url)).values())


async def test_a_record_of_two_logs_with_repeats_and_a_gap_is_the_same_elsewhere(
    writer: RecordWriter, seals: Seals, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = story(seals, 60)
    await writer.write(arrivals[:200])
    await writer.write([*arrivals[200:], seals.arrival(b"no\nevent \xff"), seals.arrival(arrivals[3].raw)])
    # Another number under an id that was recorded batches ago: the copier learns of it from the database alone.
    first = next(each for each in arrivals if b'"request-received"' in each.raw)
    renumbered = first.raw.replace(b'"source_seq":', b'"source_seq":99999')
    repeated = seals.arrival(renumbered)
    recorded = await writer.connection.fetchval("SELECT id FROM decisions WHERE stream_seq = $1", first.stream_seq)
    added = await writer.write([repeated], {recorded})
    assert [link.record.id for link in added.rows["repeats"]] == [recorded]
    gap = Gap(repeated.stream_seq + 1, repeated.stream_seq + 5)
    assert await logbook.accepted(writer.connection, writer.checkpoint, gap) is None
    await logbook.accept_gap(writer.connection, "ann", "a full disk")
    assert await logbook.accepted(writer.connection, writer.checkpoint, gap) is not None
    await writer.restart(UUID(int=2))
    await writer.write(later(Seals(seed=7)))
    # More batches than one, however fast the machine.
    monkeypatch.setattr("services.ledger.importing.BATCH_EVENTS_MAX", 64)
    found = await import_bundle(elsewhere, io.BytesIO(await bundle(writer.url)))
    assert (found.pool, found.logs) == ("main", 2)
    there, here = await everything(elsewhere), await everything(writer.url)
    for name, rows in here.items():
        assert there[name] == rows, name
    examined = await audit(elsewhere)
    assert examined.violations == []
    assert (examined.events, examined.accepted_gap_events) == (found.rows, 5)
    assert await bundle(elsewhere) == await bundle(writer.url)


async def test_a_record_goes_on_where_it_was_imported(writer: RecordWriter, seals: Seals, elsewhere: str) -> None:
    arrivals = story(seals, 60)
    middle = len(arrivals) // 2
    await writer.write(arrivals[:middle])
    await import_bundle(elsewhere, io.BytesIO(await bundle(writer.url)))
    there = RecordWriter(elsewhere)
    await there.restart()
    for each in (writer, there):
        await each.write(arrivals[middle:])
    assert await everything(elsewhere) == await everything(writer.url)
    await there.close()


@pytest.mark.parametrize("by_time", [False, True])
async def test_a_part_is_what_the_record_was_then(
    writer: RecordWriter, seals: Seals, elsewhere: str, by_time: bool
) -> None:
    arrivals = story(seals, 60)
    await writer.write(arrivals[:300])
    then = await tables(writer.connection)
    cut = {"to_seq": 300}
    if by_time:
        # The clock of these seals stands still, so what comes later is written by another hand.
        latest = await writer.connection.fetchval("SELECT max(time_ns) FROM decisions")
        raw = arrivals[300].raw.replace(f'"time_ns":{latest}'.encode(), f'"time_ns":{latest + 9}'.encode())
        arrivals[300] = Arrival(301, raw)
        cut = {"to_ns": latest}
    await writer.write(arrivals[300:])
    await import_bundle(elsewhere, io.BytesIO(await bundle(writer.url, **cut)))
    there = await everything(elsewhere)
    assert {name: there[name] for name in then} == then
    assert (await audit(elsewhere)).violations == []
    assert there["checkpoints"][0]["stream_seq"] == 300


async def test_nothing_lies_before_the_beginning(writer: RecordWriter, seals: Seals) -> None:
    await writer.write(story(seals, 3))
    with pytest.raises(NotExported, match="begins after"):
        await bundle(writer.url, to_seq=0)
    with pytest.raises(NotExported, match="begins after"):
        await bundle(writer.url, to_ns=1)


async def test_days_that_went_by_policy_stay_accounted_for(writer: RecordWriter, seals: Seals, elsewhere: str) -> None:
    record = Sealed(writer, seals)
    await record.write()
    sealed_seq = writer.checkpoint.stream_seq
    gone = await record.said_to_go()
    await record.say(gone)
    waiting = await bundle(writer.url)
    await record.drop()
    await writer.write(later(seals))
    dropped = await bundle(writer.url)
    assert await bundle(writer.url, to_seq=sealed_seq + 1) == waiting, "said to go is gone"
    await import_bundle(elsewhere, io.BytesIO(dropped))
    found = await audit(elsewhere)
    assert found.violations == []
    assert found.dropped_rows == sum(run.rows for run in gone.runs)
    with pytest.raises(NotExported, match=f"{record.day} are gone, as .*:{sealed_seq + 1} says"):
        await bundle(writer.url, to_seq=sealed_seq)


async def test_a_changed_record_is_not_exported(writer: RecordWriter, seals: Seals) -> None:
    await writer.write(story(seals, 30))
    owner = await asyncpg.connect(driver_url(writer.url))
    await owner.execute("SET session_replication_role = replica")
    await owner.execute("UPDATE decisions SET raw = raw || 'x' WHERE stream_seq = 50")
    await owner.close()
    with pytest.raises(NotExported, match=":50: the chain breaks here"):
        await bundle(writer.url)


async def test_only_an_empty_database_that_nobody_writes_takes_a_record(
    writer: RecordWriter, seals: Seals, elsewhere: str
) -> None:
    await writer.write(story(seals, 3))
    whole = await bundle(writer.url)
    await import_bundle(elsewhere, io.BytesIO(whole))
    before = await everything(elsewhere)
    with pytest.raises(NotEmpty, match="has a record already"):
        await import_bundle(elsewhere, io.BytesIO(whole))
    assert await everything(elsewhere) == before
    await writer.connection.execute("SELECT pg_advisory_lock($1)", database.ACTIVE_LOCK)
    with pytest.raises(LedgerActive, match="a ledger copies"):
        await import_bundle(writer.url, io.BytesIO(whole))


def changed(whole: bytes, change: Callable[[list[Frame]], None]) -> bytes:
    reader = BundleReader(io.BytesIO(whole))
    frames = list(reader.frames())[:-1]
    change(frames)
    file = io.BytesIO()
    writing = BundleWriter(file, reader.header)
    for each in frames:
        writing.tell(each)
    writing.close()
    return file.getvalue()


def swapped(frames: list[Frame]) -> None:
    first, second = frames[10], frames[11]
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    frames[10] = first._replace(raw=second.raw)


def last_row(frames: list[Frame]) -> None:
    assert isinstance(frames[-2], Row)
    del frames[-2]


def moved_end(frames: list[Frame]) -> None:
    end = frames[-1]
    assert isinstance(end, LogEnds)
    frames[-1] = end.model_copy(update={"stream_seq": 3})


CHANGES: dict[str, Callable[[list[Frame]], None]] = {
    "the chain breaks here": swapped,
    "row 10 follows row 10": lambda frames: frames.insert(10, frames[10]),
    "do not lead to where": last_row,
    "goes further than": moved_end,
    "there is no log to which": lambda frames: frames.pop(0) and None,
    "does not follow what is before": lambda frames: frames.append(frames[0]),
    "ends within a log": lambda frames: frames.pop() and None,
}


@pytest.mark.parametrize("rule", CHANGES)
async def test_a_changed_bundle_leaves_nothing_behind(
    writer: RecordWriter, seals: Seals, elsewhere: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies before the change has been written by then: the one transaction takes it back."""
    monkeypatch.setattr("services.ledger.importing.BATCH_EVENTS_MAX", 4)
    await writer.write(story(seals, 5))
    with pytest.raises(BadBundle, match=rule):
        await import_bundle(elsewhere, io.BytesIO(changed(await bundle(writer.url), CHANGES[rule])))
    assert await is_empty(elsewhere)


async def test_a_bundle_cut_off_anywhere_is_refused(writer: RecordWriter, seals: Seals, elsewhere: str) -> None:
    await writer.write(story(seals, 5))
    whole = await bundle(writer.url)
    for size in range(0, len(whole), 97):
        with pytest.raises(BadBundle, match="cut off"):
            list(BundleReader(io.BytesIO(whole[:size])).frames())
    with pytest.raises(BadBundle, match="cut off"):
        await import_bundle(elsewhere, io.BytesIO(whole[:-1]))
    assert await is_empty(elsewhere)


async def test_what_is_no_bundle_is_named(writer: RecordWriter, seals: Seals, monkeypatch: pytest.MonkeyPatch) -> None:
    await writer.write(story(seals, 3))
    whole = await bundle(writer.url)
    for wrong in (b"", b"PK\x03\x04 something else", gzip.compress(b"{}"), gzip.compress(b"H\x00\x00\x00\x02{}")):
        with pytest.raises(BadBundle, match=r"not a bundle of a record|Header: pool"):
            BundleReader(io.BytesIO(wrong))
    with pytest.raises(BadBundle, match=r"goes on|damaged"):
        list(BundleReader(io.BytesIO(whole + whole)).frames())
    damaged = bytearray(whole)
    damaged[-6] ^= 1
    with pytest.raises(BadBundle, match="damaged"):
        list(BundleReader(io.BytesIO(bytes(damaged))).frames())
    monkeypatch.setattr(bundles, "VERSION", 2)
    with pytest.raises(BadBundle, match="version: the bundle is of version 1, this program reads 2"):
        BundleReader(io.BytesIO(whole))
