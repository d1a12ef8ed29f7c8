"""What the deciders had folded at seals, as bytes that mean something to `replay` alone."""

from typing import Any

from services.ledger.patches import Place

KEPT_MAX = 24
"""Each has some megabytes for a hundred thousand cached blocks."""

THIN_OUT = """
DELETE FROM states s WHERE (s.log, s.stream_seq) NOT IN (
    SELECT log, stream_seq FROM states ORDER BY 1 DESC, 2 DESC LIMIT $1
) AND NOT EXISTS (SELECT FROM beginnings b WHERE (b.log, b.stream_seq) = (s.log, s.stream_seq))
"""


async def keep(connection: Any, place: Place, content: bytes) -> None:
    """Keep a state; the oldest ones go, but for that with which a part begins."""
    await connection.execute("INSERT INTO states VALUES ($1, $2, $3) ON CONFLICT DO NOTHING", *place, content)
    await connection.execute(THIN_OUT, KEPT_MAX)


async def places(connection: Any, number: int) -> list[int]:
    """Behind which sequences of a log a state was kept, oldest first."""
    rows = await connection.fetch("SELECT stream_seq FROM states WHERE log = $1 ORDER BY 1", number)
    return [row["stream_seq"] for row in rows]


async def content(connection: Any, place: Place) -> bytes:
    """The state at one of them."""
    found: bytes = await connection.fetchval("SELECT content FROM states WHERE log = $1 AND stream_seq = $2", *place)
    return found
