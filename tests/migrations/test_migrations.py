import asyncpg
import pytest

from migrations.steps import upgrade
from services.ledger.database import SchemaMissing, connect, driver_url
from services.ledger.readmodels import PATCHED_TABLES
from services.ledger.tables import READ_MODEL_KEYS

LOG_ROWS = {
    "decisions": "(log, stream_seq, type, version, raw, chain) VALUES (gen_random_uuid(), 1, 't', 1, '', $1)",
    "block_events": "(log, stream_seq, type, version, raw, chain, day) VALUES (gen_random_uuid(), 1, 't', 1, '', $1, now())",
    "repeats": "(log, stream_seq, id, source, source_seq, raw, chain) "
    "VALUES (gen_random_uuid(), 1, gen_random_uuid(), 's', 1, '', $1)",
}


@pytest.fixture
def migrated(database_url: str) -> str:
    upgrade(database_url)
    return database_url


async def test_a_database_without_the_schema_is_refused_with_the_remedy(database_url: str) -> None:
    """Whether or not another database of the server has made the role."""
    with pytest.raises(SchemaMissing, match="python -m migrations upgrade"):
        await connect(database_url)


def test_upgrading_twice_changes_nothing(migrated: str) -> None:
    upgrade(migrated)


@pytest.mark.parametrize("table", LOG_ROWS)
async def test_log_rows_are_added_and_never_changed(migrated: str, table: str) -> None:
    ledger = await connect(migrated)
    await ledger.execute("SELECT ensure_block_day(current_date)")
    await ledger.execute(f"INSERT INTO {table} {LOG_ROWS[table]}", bytes(32))
    changes = (f"UPDATE {table} SET raw = 'x'", f"DELETE FROM {table}", f"TRUNCATE {table}", f"DROP TABLE {table}")
    for change in changes:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await ledger.execute(change)
    owner = await asyncpg.connect(driver_url(migrated))
    for change in changes[:3]:
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only"):
            await owner.execute(change)
    assert await ledger.fetchval(f"SELECT count(*) FROM {table}") == 1
    await owner.close()
    await ledger.close()


async def test_days_are_partitions_that_refuse_change_themselves(migrated: str) -> None:
    ledger = await connect(migrated)
    for day in ("current_date", "current_date", "current_date + 1", "'1970-01-01'", "'2250-01-01'"):
        await ledger.execute(f"SELECT ensure_block_day({day})")
    await ledger.execute(f"INSERT INTO block_events {LOG_ROWS['block_events']}", bytes(32))
    names = [
        row["name"]
        for row in await ledger.fetch(
            "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'block_events'::regclass"
        )
    ]
    assert len(names) == 3, "two days and the rest: a wrong clock makes no tables"
    owner = await asyncpg.connect(driver_url(migrated))
    for name in names:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await ledger.execute(f"SELECT * FROM {name}")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only"):
            await owner.execute(f"DELETE FROM {name}")
    day = next(name for name in names if name != "block_events_other")
    await owner.execute(f"DROP TABLE {day}")
    await owner.close()
    await ledger.close()


async def test_every_read_model_has_the_key_that_the_writer_names(migrated: str) -> None:
    owner = await asyncpg.connect(driver_url(migrated))
    for table, key in READ_MODEL_KEYS.items():
        found = await owner.fetch(
            "SELECT attname FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey) "
            "WHERE indrelid = $1::regclass AND indisprimary",
            table,
        )
        assert {row["attname"] for row in found} == set(key), table
        required = await owner.fetch(
            "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 AND attnotnull", table
        )
        if table in {"requests", "epochs", "replicas"}:
            assert {row["attname"] for row in required} == set(PATCHED_TABLES[table]), "a patch may come first"
    await owner.close()
