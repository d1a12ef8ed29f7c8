"""What alembic runs: every step of one upgrade in one transaction, one upgrade at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, pool, text
from sqlalchemy.ext.asyncio import create_async_engine

UPGRADE_LOCK = 0x7665_7274_6D69
"""Advisory lock ("vertmi"): services that start together may all ask for the upgrade."""


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=None)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})
        context.run_migrations()


async def upgrade() -> None:
    # Services take the URL with and without the driver's name; SQLAlchemy would look for another driver.
    url = context.config.attributes["database_url"].replace("postgresql://", "postgresql+asyncpg://", 1)
    engine = create_async_engine(url, poolclass=pool.NullPool)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


asyncio.run(upgrade())
