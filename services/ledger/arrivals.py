"""Which requests arrived, when and how large: what a load is made of, and all that another run needs to see it again."""

from collections.abc import AsyncGenerator
from typing import NamedTuple

import orjson

from services.ledger import database
from services.ledger.records import BIGINT_MAX, Arrival, record
from services.ledger.seals import STATEMENT_LIMIT_S
from shared.contracts.events import NodeRegistered, RequestReceived

PREFETCH = 50
"""Rows at a time, each up to 1 MB."""

# Sequences are of the newest log alone, as in the other commands over the record. Routers' events meet in the stream out of
# the order of their clocks by as much as the network takes.
ARRIVALS = """
SELECT d.raw, d.stream_seq, r.output_tokens
FROM decisions d JOIN logs l USING (log) LEFT JOIN requests r ON r.received_id = d.id
WHERE d.type = 'request-received' AND d.time_ns BETWEEN $1 AND $2
  AND CASE WHEN l.number = (SELECT max(number) FROM logs) THEN d.stream_seq BETWEEN $3 AND $4 ELSE $3 <= 1 END
ORDER BY d.time_ns, l.number, d.stream_seq
"""


class Arrived(NamedTuple):
    """One request. `output_tokens` is how many it got; None if it did not complete."""

    time_ns: int
    data: RequestReceived
    output_tokens: int | None


class Range(NamedTuple):
    """By sequence of the newest log, and by the senders' clocks."""

    from_seq: int = 0
    to_seq: int = BIGINT_MAX
    from_ns: int = -BIGINT_MAX
    to_ns: int = BIGINT_MAX


async def arrivals(database_url: str, asked: Range) -> AsyncGenerator[Arrived, None]:
    """Every received request of the range, in the order of the routers' clocks, a few at a time.

    Errors: those of `database.connect`.
    """
    async with database.view(database_url) as connection:
        bounds = (asked.from_ns, asked.to_ns, asked.from_seq, asked.to_seq)
        cursor = connection.cursor(ARRIVALS, *bounds, prefetch=PREFETCH, timeout=STATEMENT_LIMIT_S)
        async for row in cursor:
            event = record(Arrival(row["stream_seq"], row["raw"])).event
            if event is not None and isinstance(event.data, RequestReceived):
                yield Arrived(event.time_ns, event.data, row["output_tokens"])


async def block_sizes(database_url: str) -> set[int]:
    """The tokens to a block, as the pool's nodes said when they registered last. Errors: those of `database.connect`."""
    connection = await database.connect(database_url)
    try:
        rows = await connection.fetch("SELECT spec FROM nodes WHERE spec IS NOT NULL")
        return {NodeRegistered.model_validate(orjson.loads(row["spec"])).block_tokens for row in rows}
    finally:
        await connection.close()
