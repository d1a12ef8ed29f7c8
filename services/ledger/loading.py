"""The folds' state out of the read models, so that a ledger starts at its checkpoint instead of at the first event, and out
of a snapshot of them, so that the past is folded from there.

What the tables do not hold by themselves (chains of requests, a reconciliation that was not committed, a report that is not
complete) is in the record's own bytes, and the tables say where.
"""

from typing import Any

import orjson

from services.ledger.patches import Place
from services.ledger.readmodels import ReadModels
from services.ledger.runs import Run, restore
from shared.contracts.codec import decode
from shared.contracts.envelope import Stored
from shared.contracts.events import CacheReported, NodeRegistered, PlacementReconciled, RequestReceived, RouterLost
from shared.contracts.ids import BlockId, NodeId, RequestId, Source, WorkerId, unpack_block_ids
from shared.model import holders as holders_fold
from shared.model.holders import ENDED_BLOCKS_MAX, ENDED_CHAINS_MAX, Chain, Held, Holders
from shared.model.lattice import Group
from shared.model.lost_routers import LOST_ROUTERS_MAX, LostRouters
from shared.model.parameters import Parameters
from shared.model.pool import Node, Pool, Worker

ENDED_PREFETCH = 50
"""Rows at a time, each up to 1 MB."""

OPEN_REQUESTS = """
SELECT r.request, d.source, d.raw FROM {open_requests} r JOIN decisions d ON d.id = r.received_id
ORDER BY r.received_log, r.received_seq
"""

ENDED_REQUESTS = """
SELECT r.request, d.raw FROM requests r LEFT JOIN decisions d ON d.id = r.received_id
WHERE r.ended IS NOT NULL AND (r.end_log, r.end_seq) <= ($2, $3)
ORDER BY r.end_log DESC, r.end_seq DESC, r.received_log DESC, r.received_seq DESC LIMIT $1
"""

LOST_ROUTERS = """
SELECT d.raw FROM decisions d JOIN logs l ON l.log = d.log
WHERE d.type = 'router-lost' AND (l.number, d.stream_seq) <= ($2, $3) ORDER BY l.number DESC, d.stream_seq DESC LIMIT $1
"""

OPEN_RECONCILIATIONS = """
SELECT d.raw FROM {open_reconciliations} e JOIN decisions d ON d.id = e.reconciled_id ORDER BY d.stream_seq
"""

NEWEST_PARAMETERS = """
SELECT value FROM parameters WHERE (log, stream_seq) <= ($1, $2) ORDER BY log DESC, stream_seq DESC LIMIT 1
"""

REPORT_PARTS = """
SELECT b.log, b.stream_seq, b.raw FROM block_events b JOIN logs l ON l.log = b.log
WHERE b.type = 'cache-reported' AND (l.number, b.stream_seq) BETWEEN ($1, $2) AND ($3, $4)
ORDER BY l.number, b.stream_seq
"""

NOW = Place(2**31 - 1, 2**63 - 1)
"""Behind everything that is recorded."""


class State:
    """Where the tables' state is read: as it is now, or as a snapshot has it."""

    def __init__(self, connection: Any, at: Place = NOW) -> None:
        self.at = at
        self._connection = connection

    async def rows(self, sql: str, *values: Any) -> list[Any]:
        """The rows of a query over tables that hold a state, each in braces."""
        found: list[Any] = await self._connection.fetch(sql.format_map(_Tables(self.at)), *values)
        return found


class _Tables(dict[str, str]):
    """Names of tables to what stands for them in a query."""

    def __init__(self, at: Place) -> None:
        super().__init__()
        self._at = at

    def __missing__(self, table: str) -> str:
        if self._at == NOW:
            return table
        return (
            f"(SELECT (jsonb_populate_record(NULL::{table}, value)).* FROM snapshot_rows "  # noqa: S608 - of two numbers
            f"WHERE log = {self._at.log:d} AND stream_seq = {self._at.seq:d} AND model = '{table}')"
        )


async def load(connection: Any, at: Place = NOW) -> ReadModels:
    """The state at the checkpoint, or as the snapshot `at` has it. Call it where nobody else writes."""
    state = State(connection, at)
    models = ReadModels(pool=await _pool(state), holders=await _holders(connection, state))
    models.holders.incarnations.update((node.id, node.incarnation) for node in models.pool.nodes.values() if node.spec)
    models.sources.update(await sources(connection, at))
    if (value := await connection.fetchval(NEWEST_PARAMETERS, *at)) is not None:
        models.parameters = Parameters.model_validate_json(value)
    await load_caches(connection, models, at)
    return models


async def sources(connection: Any, at: Place = NOW) -> dict[Source, tuple[int, int]]:
    """The first and last number of each source."""
    rows = await State(connection, at).rows("SELECT * FROM {sources} s")
    return {Source(row["source"]): (row["first_seq"], row["last_seq"]) for row in rows}


async def load_caches(connection: Any, models: ReadModels, at: Place = NOW) -> None:
    """What each worker holds, into folds that know nothing of it."""
    await _caches(State(connection, at), models)
    if models.reports:
        await _reports(connection, models, at)


async def _pool(state: State) -> Pool:
    pool = Pool()
    for row in await state.rows("SELECT * FROM {nodes} n ORDER BY node"):
        name = NodeId(row["node"])
        pool.nodes[name] = Node(
            name,
            spec=NodeRegistered.model_validate_json(row["spec"]) if row["spec"] else None,
            alive=row["alive"],
            cordoned=row["cordoned"],
            epoch=row["epoch"],
            composition=tuple(orjson.loads(row["composition"])),
            draining=frozenset(map(WorkerId, orjson.loads(row["draining"]))),
            adopted={int(rank): epoch for rank, epoch in orjson.loads(row["adopted"]).items()},
        )
    for row in await state.rows("SELECT * FROM {workers} w ORDER BY node, first_rank"):
        node = pool.nodes[NodeId(row["node"])]
        group = Group(row["first_rank"], row["degree"])
        worker = Worker(WorkerId(row["worker"]), node.id, group, row["capacity_us"])
        node.workers += (worker,)
        pool.workers[worker.id] = worker
    return pool


async def _lost_routers(connection: Any, at: Place) -> LostRouters:
    rows = await connection.fetch(LOST_ROUTERS, LOST_ROUTERS_MAX, *at)
    lost = [decode(row["raw"]).data for row in reversed(rows)]
    return LostRouters(each.source for each in lost if isinstance(each, RouterLost))


async def _holders(connection: Any, state: State) -> Holders:
    """The requests' chains and what the cache manager has prepared; `_caches` adds what workers hold."""
    holders = Holders(lost_routers=await _lost_routers(connection, state.at))
    for row in await state.rows(OPEN_REQUESTS):
        request = RequestId(row["request"])
        holders.open[request] = Source(row["source"])
        holders.chains[request] = _chain(row["raw"])
    for request, chain in reversed(await _ended(connection, state.at)):
        if chain is not None:
            holders.chains[request] = chain
        holders_fold.end(holders, request)
    for row in await state.rows(OPEN_RECONCILIATIONS):
        data = decode(row["raw"]).data
        assert isinstance(data, PlacementReconciled), "epochs.reconciled_id names a placement-reconciled"
        holders.reconciled[data.node, data.epoch] = data
    return holders


async def _ended(connection: Any, at: Place) -> list[tuple[RequestId, Chain | None]]:
    """The newest ended requests, newest first: at least as many as the fold keeps, and not many more in memory."""
    found: list[tuple[RequestId, Chain | None]] = []
    blocks = 0
    async with connection.transaction():
        async for row in connection.cursor(ENDED_REQUESTS, ENDED_CHAINS_MAX, *at, prefetch=ENDED_PREFETCH):
            chain = _chain(row["raw"]) if row["raw"] is not None else None
            found.append((RequestId(row["request"]), chain))
            blocks += len(chain or ())
            if blocks > ENDED_BLOCKS_MAX:
                break
    return found


def _chain(raw: bytes) -> Chain:
    data = decode(raw).data
    assert isinstance(data, RequestReceived), "requests.received_id names a request-received"
    return tuple(unpack_block_ids(data.block_ids))


async def _caches(state: State, models: ReadModels) -> None:
    rows: dict[WorkerId, list[tuple[int, Run]]] = {}
    for row in await state.rows("SELECT * FROM {cached_runs} r ORDER BY worker, run"):
        parent = BlockId(row["parent"]) if row["parent"] is not None else None
        run = Run(parent, unpack_block_ids(row["block_ids"]))
        rows.setdefault(WorkerId(row["worker"]), []).append((row["run"], run))
    for row in await state.rows("SELECT * FROM {caches} c ORDER BY worker"):
        worker = WorkerId(row["worker"])
        models.holders.workers[worker] = Held(row["incarnation"], row["trust"], row["number"])
        models.runs[worker] = restore(row["next_run"], rows.get(worker, []))
        for _, run in rows.get(worker, []):
            models.holders.index.add(worker, run.parent, run.blocks)
        if row["report_seq"] is not None:
            models.reports[worker] = Place(row["report_log"], row["report_seq"])


async def _reports(connection: Any, models: ReadModels, at: Place) -> None:
    """The parts, so far, of full reports that are not complete."""
    for row in await connection.fetch(REPORT_PARTS, *min(models.reports.values()), *at):
        event = decode(row["raw"])
        assert isinstance(event.data, CacheReported), "the query is for cache-reported"
        if event.data.worker in models.reports:
            # None of these completes a report: then it would have no place in `reports`.
            holders_fold.evolve(models.holders, Stored(str(row["log"]), row["stream_seq"], event))
