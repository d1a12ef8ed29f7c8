"""A record written batch by batch without a stream, and what is in its tables."""

from collections.abc import Container, Sequence
from typing import Any
from uuid import UUID

from services.ledger import database
from services.ledger.batches import Batch, Checkpoint, batch
from services.ledger.loading import load
from services.ledger.logbook import open_newest
from services.ledger.readmodels import ReadModels
from services.ledger.records import Arrival
from services.ledger.tables import READ_MODEL_KEYS, TableWriter

STREAM = UUID(int=1)


class RecordWriter:
    """What the copier does between the stream and the database. `restart` forgets everything but the database."""

    models: ReadModels
    checkpoint: Checkpoint

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection: Any = None

    async def restart(self, stream: UUID = STREAM) -> None:
        await self.close()
        self.connection = await database.connect(self.url)
        opened = await open_newest(self.connection, stream, 10**9, "main", UUID(int=99))
        self.checkpoint = opened.checkpoint
        self.models = await load(self.connection)
        self.writer = TableWriter(self.connection)

    async def write(self, arrivals: Sequence[Arrival], recorded_ids: Container[UUID] = ()) -> Batch:
        added = batch(self.models, self.checkpoint, arrivals, recorded_ids)
        async with self.connection.transaction():
            await self.writer.write_log(added)
            await self.writer.write_read_models(self.models)
        self.checkpoint = added.checkpoint
        return added

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()
            self.connection = None


async def tables(connection: Any) -> dict[str, list[dict[str, Any]]]:
    """Every row of every read model."""
    return {
        table: [dict(row) for row in await connection.fetch(f"SELECT * FROM {table} ORDER BY {', '.join(key)}")]
        for table, key in READ_MODEL_KEYS.items()
    }
