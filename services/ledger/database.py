"""Connections to the record's database, always as the role that may only add to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

ROLE = "vertumnus_ledger"
ACTIVE_LOCK = 0x7665_7274_6C65
"""Advisory lock ("vertle") of the one process that writes: the active ledger, or a rebuild."""

CONNECT_LIMIT_S = 5.0
STATEMENT_LIMIT_S = 60.0
"""A batch takes 0.1 s; what takes a minute has met a lock or a dead network."""

AWAY = (OSError, TimeoutError, asyncio.TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
"""What a call raises while the database is away, full, or refuses us."""


class SchemaMissing(Exception):
    """The database has not been migrated, or not to this version."""


REMEDY = "the database lacks this version's schema of the record: run `python -m migrations upgrade`"


async def connect(database_url: str) -> Any:
    """One connection. Errors: those in `AWAY`; SchemaMissing."""
    try:
        connection = await asyncpg.connect(
            driver_url(database_url),
            timeout=CONNECT_LIMIT_S,
            command_timeout=STATEMENT_LIMIT_S,
            # A dead peer must not keep the lock of the active ledger: the server looks after 15 s of silence.
            server_settings={
                "role": ROLE,
                "tcp_keepalives_idle": "5",
                "tcp_keepalives_interval": "5",
                "tcp_keepalives_count": "2",
            },
        )
    except asyncpg.InvalidParameterValueError as error:
        raise SchemaMissing(f"{REMEDY} ({error})") from error
    if await connection.fetchval("SELECT to_regclass('beginnings')") is None:
        await connection.close()
        raise SchemaMissing(REMEDY)
    return connection


@asynccontextmanager
async def view(database_url: str, exported: str | None = None) -> AsyncIterator[Any]:
    """A connection on which the record stays what it is now, or what it is in a view that another one has `exported`. It only
    reads.

    Errors: those of `connect`. Those of the block come out as they are: to end the transaction on a dead connection would hide
    them.
    """
    connection = await connect(database_url)
    try:
        await connection.transaction(isolation="repeatable_read", readonly=True).start()
        if exported is not None:
            await connection.execute(f"SET TRANSACTION SNAPSHOT '{exported}'")
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def whole_view(database_url: str) -> AsyncIterator[Any]:
    """A `view` from which no day of block events goes: a dropped partition's rows are gone from older views, too.

    `drop_block_day` gives up after 2 s, and tries again later. Whoever begins while it waits is held up for as long, so this is
    for those who must not miss a row.
    """
    async with view(database_url) as connection:
        await connection.execute("LOCK TABLE block_events IN ACCESS SHARE MODE")
        yield connection


def pool(database_url: str, connections_max: int) -> Any:
    """A pool that connects when first used, so that it can be made while the database is away."""
    return asyncpg.create_pool(
        driver_url(database_url),
        min_size=0,
        max_size=connections_max,
        timeout=CONNECT_LIMIT_S,
        command_timeout=STATEMENT_LIMIT_S,
        server_settings={"role": ROLE, "default_transaction_read_only": "on"},
    )


def driver_url(database_url: str) -> str:
    """The URL without SQLAlchemy's name for the driver."""
    return database_url.replace("postgresql+asyncpg://", "postgresql://", 1)
