"""Writing: the rows of a batch and what they change in the read models, within the caller's transaction.

One statement per table and batch. Read-model rows travel as one JSON document, which Postgres turns into rows of the
table's own type; so the columns are named in the migration and nowhere else.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

import orjson

from services.ledger import logbook
from services.ledger.batches import Batch, Link
from services.ledger.patches import Row
from services.ledger.readmodels import PATCHED_TABLES, Changes, ReadModels
from services.ledger.records import LOG_TABLES, LogTable
from shared.contracts.ids import NodeId, WorkerId
from shared.model.pool import Node

READ_MODEL_KEYS = {
    **PATCHED_TABLES,
    "sources": ("source",),
    "nodes": ("node",),
    "workers": ("worker",),
    "caches": ("worker",),
    "cached_runs": ("worker", "run"),
}
"""Every read-model table with its key."""

_ROW = (
    "$1::uuid, * FROM unnest($2::bigint[], $3::uuid[], $4::text[], $5::int[], $6::text[], $7::text[], $8::bigint[], "
    "$9::bigint[], $10::text[], $11::uuid[], $12::bytea[], $13::bytea[]"
)
_COLUMNS = "log, stream_seq, id, type, version, pool, source, source_seq, time_ns, correlation, causation, raw, chain"
INSERTS: Mapping[LogTable, str] = {
    "decisions": f"INSERT INTO decisions ({_COLUMNS}) SELECT {_ROW})",
    "block_events": f"INSERT INTO block_events ({_COLUMNS}, day) SELECT {_ROW}, $14::date[])",
    "repeats": (
        "INSERT INTO repeats (log, stream_seq, id, source, source_seq, raw, chain) SELECT $1::uuid, * FROM "
        "unnest($2::bigint[], $3::uuid[], $4::text[], $5::bigint[], $6::bytea[], $7::bytea[])"
    ),
}


class TableWriter:
    """Writes on one connection. It remembers which days have a partition and which columns the tables have."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._days: set[date] = set()
        self._upserts: dict[str, str] = {}

    async def write_log(self, batch: Batch) -> None:
        """Add the batch's rows and move the checkpoint. Errors: asyncpg.UniqueViolationError for a recorded id."""
        checkpoint = batch.checkpoint
        for table in LOG_TABLES:
            if links := batch.rows[table]:
                await self._ensure_days(links if table == "block_events" else ())
                await self._connection.execute(INSERTS[table], checkpoint.log, *_columns(table, links))
        await logbook.move(self._connection, checkpoint)

    async def write_read_models(self, models: ReadModels) -> None:
        """Bring the tables to the folds' state."""
        changes = models.take()
        for table in PATCHED_TABLES:
            await self._upsert(table, list(changes.patches.get(table, {}).values()))
        await self._upsert("sources", [_source_row(models, each) for each in sorted(changes.sources)])
        await self._write_nodes(models, changes.nodes)
        await self._write_caches(models, changes)

    async def _write_nodes(self, models: ReadModels, nodes: set[NodeId]) -> None:
        if not nodes:
            return
        names = sorted(each for each in nodes if each in models.pool.nodes)
        await self._upsert("nodes", [node_row(models.pool.nodes[each]) for each in names])
        await self._connection.execute("DELETE FROM workers WHERE node = ANY($1::text[])", names)
        # By id: a commit that names a worker twice is a fault of its sender and must not stop the record.
        rows = {row["worker"]: row for each in names for row in _worker_rows(models, each)}
        await self._upsert("workers", list(rows.values()))

    async def _write_caches(self, models: ReadModels, changes: Changes) -> None:
        workers = changes.caches | changes.runs.keys()
        gone = sorted(each for each in workers if each not in models.holders.workers)
        if gone:
            for table in ("caches", "cached_runs"):
                await self._connection.execute(f"DELETE FROM {table} WHERE worker = ANY($1::text[])", gone)  # noqa: S608
        kept = sorted(workers - set(gone))
        await self._upsert("caches", [_cache_row(models, each) for each in kept])
        changed = [(each, number) for each in kept for number in sorted(changes.runs.get(each, ()))]
        emptied = [(each, number) for each, number in changed if number not in models.runs[each].runs]
        if emptied:
            await self._connection.execute(
                "DELETE FROM cached_runs USING unnest($1::text[], $2::bigint[]) AS gone (worker, run) "
                "WHERE cached_runs.worker = gone.worker AND cached_runs.run = gone.run",
                [worker for worker, _ in emptied],
                [number for _, number in emptied],
            )
        present = [(each, number) for each, number in changed if number in models.runs[each].runs]
        await self._upsert("cached_runs", [_run_row(models, each, number) for each, number in present])

    async def _upsert(self, table: str, rows: Sequence[Row]) -> None:
        if rows:
            if table not in self._upserts:
                self._upserts[table] = await self._upsert_statement(table)
            await self._connection.execute(self._upserts[table], orjson.dumps(rows).decode())

    async def _upsert_statement(self, table: str) -> str:
        """A column that a row does not name keeps its value, except in tables whose rows are always whole."""
        columns = await self._connection.fetch(
            "SELECT attname FROM pg_attribute WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped", table
        )
        key = READ_MODEL_KEYS[table]
        rest = [row["attname"] for row in columns if row["attname"] not in key]
        keep = table in PATCHED_TABLES
        sets = ", ".join(f"{c} = COALESCE(EXCLUDED.{c}, t.{c})" if keep else f"{c} = EXCLUDED.{c}" for c in rest)
        return (
            f"INSERT INTO {table} AS t SELECT * FROM json_populate_recordset(NULL::{table}, $1::json) "  # noqa: S608
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {sets}"
        )

    async def _ensure_days(self, links: Iterable[Link]) -> None:
        for day in sorted({each.record.day for each in links} - self._days):
            await self._connection.execute("SELECT ensure_block_day($1)", day)
            self._days.add(day)


def _columns(table: LogTable, links: Sequence[Link]) -> list[list[Any]]:
    rows = [each.record for each in links]
    chains = [each.chain for each in links]
    if table == "repeats":
        return [
            [row.stream_seq for row in rows],
            [row.id for row in rows],
            [row.source for row in rows],
            [row.source_seq for row in rows],
            [row.raw for row in rows],
            chains,
        ]
    columns: list[list[Any]] = [
        [row.stream_seq for row in rows],
        [row.id for row in rows],
        [row.type for row in rows],
        [row.version for row in rows],
        [row.pool for row in rows],
        [row.source for row in rows],
        [row.source_seq for row in rows],
        [row.time_ns for row in rows],
        [row.correlation for row in rows],
        [row.causation for row in rows],
        [row.raw for row in rows],
        chains,
    ]
    return [*columns, [row.day for row in rows]] if table == "block_events" else columns


def _source_row(models: ReadModels, source: Any) -> Row:
    first, last = models.sources[source]
    return {"source": source, "first_seq": first, "last_seq": last}


def node_row(node: Node) -> Row:
    """A node as its row says it."""
    return {
        "node": node.id,
        "alive": node.alive,
        "cordoned": node.cordoned,
        "incarnation": node.incarnation,
        "epoch": node.epoch,
        "composition": list(node.composition),
        "draining": sorted(node.draining),
        "adopted": {str(rank): epoch for rank, epoch in sorted(node.adopted.items())},
        "spec": node.spec.model_dump(mode="json") if node.spec else None,
    }


def _worker_rows(models: ReadModels, name: NodeId) -> list[Row]:
    return [
        {
            "worker": each.id,
            "node": each.node,
            "first_rank": each.group.first_rank,
            "degree": each.degree,
            "capacity_us": each.capacity_us,
            "schedulable": models.pool.schedulable(each),
        }
        for each in models.pool.nodes[name].workers
    ]


def _cache_row(models: ReadModels, worker: WorkerId) -> Row:
    held = models.holders.workers[worker]
    report = models.reports.get(worker) if held.report_parts else None
    return {
        "worker": worker,
        "incarnation": held.incarnation,
        "number": held.number,
        "trust": held.trust,
        "blocks": models.holders.index.counts.get(worker, 0),
        "next_run": models.runs[worker].next_run if worker in models.runs else 1,
        "report_log": report.log if report else None,
        "report_seq": report.seq if report else None,
    }


def _run_row(models: ReadModels, worker: WorkerId, number: int) -> Row:
    run = models.runs[worker].runs[number]
    return {
        "worker": worker,
        "run": number,
        "parent": f"\\x{run.parent.hex()}" if run.parent is not None else None,
        "block_ids": f"\\x{b''.join(run.blocks).hex()}",
    }
