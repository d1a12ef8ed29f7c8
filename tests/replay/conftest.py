from collections.abc import AsyncIterator, Sequence

import pytest

from services.ledger.records import Arrival
from shared.contracts.codec import encode
from shared.contracts.envelope import Stored
from tests.services.ledger.record_writer import RecordWriter


@pytest.fixture
async def writer(record_url: str) -> AsyncIterator[RecordWriter]:
    """An empty record, ready to be written."""
    writing = RecordWriter(record_url)
    await writing.restart()
    yield writing
    await writing.close()


def arrivals(log: Sequence[Stored], first_seq: int = 1) -> list[Arrival]:
    """A log as its stream delivers it."""
    return [Arrival(seq, encode(each.event)) for seq, each in enumerate(log, first_seq)]
