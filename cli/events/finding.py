"""Finding one thing in the record."""

from typing import Any
from uuid import UUID

from services.ledger import database, queries


async def find(database_url: str, what: str) -> dict[str, Any] | None:
    """The event with id, sequence (of the newest log) or `LOG:SEQ` `what`, else the request of that name, else None.

    A request may be named as its client knows it: `chatcmpl-…`, `cmpl-…`, or the `x-request-id` that it sent (its newest one).
    Errors: those of `database.connect`.
    """
    connection = await database.connect(database_url)
    try:
        if (event_id := _uuid(what)) is not None:
            found = await queries.event_of_id(connection, event_id)
        else:
            log_text, colon, seq_text = what.rpartition(":")
            log = _uuid(log_text) if colon else await queries.newest_log(connection)
            is_place = log is not None and seq_text.isascii() and seq_text.isdigit() and len(seq_text) < 19
            found = await queries.event_at(connection, log, int(seq_text)) if log and is_place else None
        if found:
            return found
        named = await queries.request_named(connection, what)
        return named.told if named else None
    finally:
        await connection.close()


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
