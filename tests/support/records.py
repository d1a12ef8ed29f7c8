"""Databases with the schema of the record."""

import asyncio
from collections.abc import Callable
from itertools import count

import asyncpg

from cli.embedded.postgres import EmbeddedPostgres
from migrations.steps import upgrade
from services.ledger.database import driver_url

_TEMPLATE = "record"


def record_maker(server: EmbeddedPostgres) -> Callable[[], str]:
    """Makes migrated, empty databases: copies of one, because migrating each would take ten times as long."""
    upgrade(server.create_database(_TEMPLATE))
    numbers = count(1)

    async def copy(name: str) -> None:
        connection = await asyncpg.connect(driver_url(server.url()))
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE} STRATEGY wal_log")
        await connection.close()

    def new() -> str:
        name = f"{_TEMPLATE}_{next(numbers)}"
        asyncio.run(copy(name))
        return server.url(name)

    return new
