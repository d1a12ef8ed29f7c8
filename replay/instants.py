"""The whole state of the pool as of an instant: the folds behind the read models, run up to there.

The record's read models say what is now. This folds the same events with the same code (`services/ledger/readmodels.py`),
and stops.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from services.ledger import database, reading
from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels, evolve
from services.ledger.records import record
from shared.contracts.ids import NodeId

OPEN_REQUESTS_MAX = 1_000
"""More are counted, not listed."""

Json = dict[str, Any]


class Instant(NamedTuple):
    """A sequence of the newest log, or nanoseconds since 1970 by the senders' clocks."""

    number: int
    is_seq: bool


class Nothing(LookupError):
    """The record begins later, or is empty."""


async def states(
    database_url: str, instants: list[Instant], progress: Callable[[int], None] | None = None
) -> list[Json]:
    """The state as of each instant, in their order: everything that lies up to it. One pass over one snapshot.

    An instant by time ends before the first event that was sent later. Errors: Nothing; those of `database.connect`.
    """
    connection = await database.connect(database_url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            logs = await reading.logs(connection)
            if not logs:
                raise Nothing("the record is empty")
            return await _fold(connection, logs, instants, progress)
    finally:
        await connection.close()


async def _fold(
    connection: Any, logs: list[reading.LogInfo], instants: list[Instant], progress: Callable[[int], None] | None
) -> list[Json]:
    models, waiting, told, events = ReadModels(), dict(enumerate(instants)), dict[int, Json](), 0
    place: Json = {}
    for log in logs:
        async for page in reading.stories(connection, log.log, 0, log.stream_seq):
            for row in page:
                event = record(row)
                for at, instant in list(waiting.items()):
                    newest = log is logs[-1]
                    number = row.stream_seq if instant.is_seq else event.time_ns or 0
                    if number > instant.number and (newest or not instant.is_seq):
                        told[at] = state(models, place)
                        del waiting[at]
                if not waiting:
                    return _all(told)
                evolve(models, str(log.log), Place(log.number, row.stream_seq), event)
                place = {"log": str(log.log), "stream_seq": row.stream_seq, "time_ns": event.time_ns}
            models.take()
            events += len(page)
            if progress is not None:
                progress(events)
    for at in waiting:
        told[at] = state(models, place)
    return _all(told)


def _all(told: dict[int, Json]) -> list[Json]:
    found = [told[at] for at in sorted(told)]
    if any(not each["place"] for each in found):
        raise Nothing("the record begins after that instant")
    return found


def state(models: ReadModels, place: Json) -> Json:
    """A fold's state as JSON."""
    pool, holders = models.pool, models.holders
    return {
        "place": place,
        "parameters": models.parameters.model_dump(mode="json"),
        "nodes": {name: _node(models, name) for name in sorted(pool.nodes)},
        "workers": {
            worker.id: {
                "degree": worker.degree,
                "schedulable": pool.schedulable(worker),
                "trust": holders.trust(worker.id),
                "blocks": holders.index.counts.get(worker.id, 0),
            }
            for worker in sorted(pool.workers.values(), key=lambda each: (each.node, each.group.first_rank))
        },
        "open_requests": len(holders.open),
        "requests": sorted(holders.open)[:OPEN_REQUESTS_MAX],
        "blocks": len(holders.index.index),
    }


def _node(models: ReadModels, name: NodeId) -> Json:
    node = models.pool.nodes[name]
    return {
        "alive": node.alive,
        "cordoned": node.cordoned,
        "incarnation": node.incarnation,
        "epoch": node.epoch,
        "composition": list(node.composition),
        "draining": sorted(node.draining),
    }


def differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every part in which two states differ, with both values; None where a part is missing."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [(path, one, other)]
    names = [*one, *(name for name in other if name not in one)]
    inside = (differences(one.get(name), other.get(name), f"{path}.{name}" if path else name) for name in names)
    return [difference for each in inside for difference in each]
