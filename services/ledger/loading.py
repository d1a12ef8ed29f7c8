"""The folds' state out of the read models, so that a ledger starts at its checkpoint instead of at the first event.

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
SELECT r.request, d.source, d.raw FROM requests r JOIN decisions d ON d.id = r.received_id
WHERE r.ended IS NULL ORDER BY r.received_log, r.received_seq
"""

ENDED_REQUESTS = """
SELECT r.request, d.raw FROM requests r LEFT JOIN decisions d ON d.id = r.received_id
WHERE r.ended IS NOT NULL ORDER BY r.end_log DESC, r.end_seq DESC, r.received_log DESC, r.received_seq DESC LIMIT $1
"""

LOST_ROUTERS = """
SELECT d.raw FROM decisions d JOIN logs l ON l.log = d.log
WHERE d.type = 'router-lost' ORDER BY l.number DESC, d.stream_seq DESC LIMIT $1
"""

UNCOMMITTED_RECONCILIATIONS = """
SELECT d.raw FROM epochs e JOIN decisions d ON d.id = e.reconciled_id
WHERE e.status <> 'committed' ORDER BY d.stream_seq
"""

REPORT_PARTS = """
SELECT b.log, b.stream_seq, b.raw FROM block_events b JOIN logs l ON l.log = b.log
WHERE b.type = 'cache-reported' AND (l.number, b.stream_seq) >= ($1, $2) ORDER BY l.number, b.stream_seq
"""


async def load(connection: Any) -> ReadModels:
    """The state at the checkpoint. Call it where nobody else writes."""
    models = ReadModels(pool=await _pool(connection), holders=await _holders(connection))
    models.holders.incarnations.update((node.id, node.incarnation) for node in models.pool.nodes.values() if node.spec)
    for row in await connection.fetch("SELECT * FROM sources"):
        models.sources[Source(row["source"])] = row["first_seq"], row["last_seq"]
    newest = "SELECT value FROM parameters ORDER BY log DESC, stream_seq DESC LIMIT 1"
    if (value := await connection.fetchval(newest)) is not None:
        models.parameters = Parameters.model_validate_json(value)
    await _caches(connection, models)
    return models


async def _pool(connection: Any) -> Pool:
    pool = Pool()
    for row in await connection.fetch("SELECT * FROM nodes ORDER BY node"):
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
    for row in await connection.fetch("SELECT * FROM workers ORDER BY node, first_rank"):
        node = pool.nodes[NodeId(row["node"])]
        group = Group(row["first_rank"], row["degree"])
        worker = Worker(WorkerId(row["worker"]), node.id, group, row["capacity_us"])
        node.workers += (worker,)
        pool.workers[worker.id] = worker
    return pool


async def _lost_routers(connection: Any) -> LostRouters:
    rows = await connection.fetch(LOST_ROUTERS, LOST_ROUTERS_MAX)
    lost = [decode(row["raw"]).data for row in reversed(rows)]
    return LostRouters(each.source for each in lost if isinstance(each, RouterLost))


async def _holders(connection: Any) -> Holders:
    """The requests' chains and what the cache manager has prepared; `_caches` adds what workers hold."""
    holders = Holders(lost_routers=await _lost_routers(connection))
    for row in await connection.fetch(OPEN_REQUESTS):
        request = RequestId(row["request"])
        holders.open[request] = Source(row["source"])
        holders.chains[request] = _chain(row["raw"])
    for request, chain in reversed(await _ended(connection)):
        if chain is not None:
            holders.chains[request] = chain
        holders_fold.end(holders, request)
    for row in await connection.fetch(UNCOMMITTED_RECONCILIATIONS):
        data = decode(row["raw"]).data
        assert isinstance(data, PlacementReconciled), "epochs.reconciled_id names a placement-reconciled"
        holders.reconciled[data.node, data.epoch] = data
    return holders


async def _ended(connection: Any) -> list[tuple[RequestId, Chain | None]]:
    """The newest ended requests, newest first: at least as many as the fold keeps, and not many more in memory."""
    found: list[tuple[RequestId, Chain | None]] = []
    blocks = 0
    async with connection.transaction():
        async for row in connection.cursor(ENDED_REQUESTS, ENDED_CHAINS_MAX, prefetch=ENDED_PREFETCH):
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


async def _caches(connection: Any, models: ReadModels) -> None:
    rows: dict[WorkerId, list[tuple[int, Run]]] = {}
    for row in await connection.fetch("SELECT * FROM cached_runs ORDER BY worker, run"):
        parent = BlockId(row["parent"]) if row["parent"] is not None else None
        run = Run(parent, unpack_block_ids(row["block_ids"]))
        rows.setdefault(WorkerId(row["worker"]), []).append((row["run"], run))
    for row in await connection.fetch("SELECT * FROM caches ORDER BY worker"):
        worker = WorkerId(row["worker"])
        models.holders.workers[worker] = Held(row["incarnation"], row["trust"], row["number"])
        models.runs[worker] = restore(row["next_run"], rows.get(worker, []))
        for _, run in rows.get(worker, []):
            models.holders.index.add(worker, run.parent, run.blocks)
        if row["report_seq"] is not None:
            models.reports[worker] = Place(row["report_log"], row["report_seq"])
    await _reports(connection, models)


async def _reports(connection: Any, models: ReadModels) -> None:
    """The parts, so far, of full reports that are not complete."""
    if not models.reports:
        return
    for row in await connection.fetch(REPORT_PARTS, *min(models.reports.values())):
        event = decode(row["raw"])
        assert isinstance(event.data, CacheReported), "the query is for cache-reported"
        if event.data.worker in models.reports:
            # None of these completes a report: then it would have no place in `reports`.
            holders_fold.evolve(models.holders, Stored(str(row["log"]), row["stream_seq"], event))
