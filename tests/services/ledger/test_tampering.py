"""Whoever owns the server changes, removes or moves a row: the audit names the first sequence that is not what it was."""

import asyncpg
import pytest

from services.ledger.audit import Audit, audit
from services.ledger.database import driver_url
from services.ledger.records import LOG_TABLES, LogTable
from tests.services.ledger.conftest import Seals, story
from tests.services.ledger.record_writer import RecordWriter

AWAY = 1_000_000
CHANGES = {
    "changed": ["UPDATE {table} SET raw = raw || ' ' WHERE stream_seq = {one}"],
    "removed": ["DELETE FROM {table} WHERE stream_seq = {one}"],
    "moved": [
        f"UPDATE {{table}} SET stream_seq = {AWAY} WHERE stream_seq = {{one}}",
        "UPDATE {table} SET stream_seq = {one} WHERE stream_seq = {next}",
        f"UPDATE {{table}} SET stream_seq = {{next}} WHERE stream_seq = {AWAY}",
    ],
}


async def written(writer: RecordWriter, seals: Seals) -> None:
    """A record with rows in each of its chained tables."""
    first = story(seals, 20)
    await writer.write(first)
    await writer.write([seals.arrival(each.raw) for each in first[:10]])


async def tampered(writer: RecordWriter, table: LogTable, change: str) -> tuple[int, Audit]:
    owner = await asyncpg.connect(driver_url(writer.url))
    # As somebody would who owns the server: the trigger keeps only the honest from mistakes.
    await owner.execute("SET session_replication_role = replica")
    rows = await owner.fetch(f"SELECT stream_seq FROM {table} ORDER BY 1 OFFSET 4 LIMIT 2")
    one, following = (row["stream_seq"] for row in rows)
    for statement in CHANGES[change]:
        await owner.execute(statement.format(table=table, one=one, next=following))
    await owner.close()
    return one, await audit(writer.url)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("table", LOG_TABLES)
async def test_the_first_bad_sequence_is_named(
    writer: RecordWriter, seals: Seals, table: LogTable, change: str
) -> None:
    await written(writer, seals)
    assert (await audit(writer.url)).clean
    seq, found = await tampered(writer, table, change)
    expected = f"{seq} to {seq} are missing" if change == "removed" else f":{seq}: "
    assert expected in found.violations[0], found.violations
    assert any(each.startswith(table) and "the chain breaks" in each for each in found.violations)
