"""The tables say what the folds say, whatever the batches and restarts between."""

import random
from collections.abc import Iterator
from uuid import UUID

import asyncpg
import orjson
import pytest

from bench.ledger_traffic import Told, Traffic
from services.ledger import loading
from services.ledger.loading import load
from services.ledger.readmodels import ReadModels
from services.ledger.rebuild import LedgerActive, rebuild
from services.ledger.records import Arrival
from shared.contracts.events import (
    BlockRun,
    BlocksStored,
    CacheReported,
    Cordoned,
    DrainStarted,
    EpochAborted,
    Frozen,
    NodeLost,
    ParametersChanged,
    PlacementReconciled,
    ReclamationRequested,
    ReconciledWorker,
    ReconfigurationPlanned,
    ReplicaInstalled,
    ReplicationFailed,
    ReplicationRequested,
    RequestAssigned,
    RequestCompleted,
    RouterLost,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId
from shared.model import holders as holders_fold
from tests.services.ledger.conftest import Seals
from tests.services.ledger.record_writer import RecordWriter, tables
from tests.support.story import assigned, committed, completed, received, registered

N0 = NodeId("n0")
W0, W1 = WorkerId("n0/1/0"), WorkerId("n0/1/1")


def ids(*numbers: int) -> bytes:
    return b"".join(each.to_bytes(16, "big") for each in numbers)


def eventful() -> Iterator[Told]:
    """Everything that a read model reacts to, on top of ordinary traffic."""
    traffic = Traffic(7)
    yield from traffic.start()
    for _ in range(30):
        yield from traffic.request()
    yield Told("controller", traffic.window(1))
    yield Told("router", received("open-1", 640, block_ids=ids(*range(100, 110))), "open-1")
    yield Told("router", assigned("open-1", W0, 640), "open-1")
    yield Told("worker", stored(W0, 900, cause="fetch", blocks=1))  # its number jumps: degraded
    yield Told("worker", report(W0, 1, 2, BlockRun(block_ids=ids(1, 2, 3))))
    yield Told("worker", report(W0, 2, 2, BlockRun(parent=ids(2), block_ids=ids(4, 5)), number=900))
    yield Told("worker", report(W1, 1, 3, BlockRun(block_ids=ids(7, 8))))
    yield Told("worker", report(W1, 2, 3, BlockRun(parent=ids(8), block_ids=ids(9))))
    yield Told("controller", ParametersChanged(parameters_version=1, changes={"beta": 5.0}, asked_by="ann"))
    yield Told("controller", Frozen(asked_by="ann", reason="incident"))
    yield Told("controller", Cordoned(node=N0, asked_by="ann"))
    yield Told("controller", planned(2, (2, 2, 4)))
    yield Told("controller", DrainStarted(node=N0, epoch=2, workers=(W0, W1), deadline_us=15_000_000))
    yield Told("controller", EpochAborted(node=N0, epoch=2, step="draining", reason="too slow"))
    yield Told("controller", planned(3, (2, 2, 4)))
    kept = BlockRun(block_ids=ids(1, 2))
    reconciled = ReconciledWorker(worker=WorkerId("n0/3/0"), retained=(kept,), pending=())
    yield Told("controller", PlacementReconciled(node=N0, epoch=3, workers=(reconciled,)))
    yield Told("controller", replication("op-1"))
    yield Told("controller", ReplicaInstalled(operation="op-1", z=ids(5), destination=W1, blocks=2, copy_us=11))
    yield Told("controller", replication("op-2"))
    yield Told("controller", ReplicationFailed(operation="op-2", z=ids(5), destination=W1, reason="timeout"))
    yield Told("controller", ReclamationRequested(operation="op-3", z=ids(5), worker=W1, blocks=2, score=-1.5))
    yield Told("controller", committed(epoch=3, composition=(2, 2, 4)))
    yield Told("router", received("lost-1", 64, block_ids=ids(200)), "lost-1")
    yield Told("controller", RouterLost(router="router", source="router-1-0"))
    yield Told("router", completed("lost-1", W0, 5), "lost-1")  # a second end
    yield Told("router", received("late", 64, block_ids=ids(202)), "late")  # it does not know yet
    yield Told("router", assigned("late", W0, 64), "late")
    yield Told("worker", NodeLost(node=N0, incarnation=1, reason="rank died"))
    yield Told("worker", registered(incarnation=2, epoch=3, composition=(2, 2, 4)))
    # What no service would say, and what must not stop the record:
    yield Told("worker", stored(WorkerId("n9/1/0"), 1, cause="fetch", blocks=1))
    yield Told("controller", ParametersChanged(parameters_version=2, changes={"beta": -1}, asked_by="ann"))
    bad_chain = received("bad-chain", 64).model_copy(update={"block_ids": b"odd"})  # nobody checks a copy
    yield Told("router", bad_chain, "bad-chain")
    yield Told("controller", replication("x" * 300))
    yield Told("controller", committed(epoch=4, composition=(2, 2, 4)))
    yield Told("controller", received("last", 64, block_ids=ids(201)), "last")  # of a process that is not lost
    last = stored(WorkerId("n0/4/0"), 1, cause="fetch", blocks=3)
    yield Told("worker", last.model_copy(update={"incarnation": 2}))


def stored(worker: WorkerId, number: int, cause: str, blocks: int) -> BlocksStored:
    run = BlockRun(block_ids=ids(*range(number, number + blocks)))
    return BlocksStored.model_validate(
        {"worker": worker, "incarnation": 1, "number": number, "cause": cause, "blocks": blocks, "runs": (run,)}
    )


def report(worker: WorkerId, part: int, parts: int, *runs: BlockRun, number: int = 1_000) -> CacheReported:
    return CacheReported(worker=worker, incarnation=1, number=number, part=part, parts=parts, runs=runs)


def planned(epoch: int, composition: tuple[int, ...]) -> ReconfigurationPlanned:
    return ReconfigurationPlanned(
        node=N0,
        epoch=epoch,
        policy="paper",
        reason="long share rose",
        old_composition=(1, 1, 2, 4),
        new_composition=composition,
        retiring=(W0, W1),
        coming=(),
    )


def replication(operation: str) -> ReplicationRequested:
    return ReplicationRequested(
        operation=operation,
        z=ids(5),
        degree=1,
        kind="inter",
        sources=(W0,),
        destination=W1,
        first_depth=0,
        blocks=2,
        score=0.5,
    )


def told_by(models: ReadModels) -> dict[str, object]:
    """A state as values that compare; a chain whose request has long ended is nobody's business."""
    holders = models.holders
    return {
        "pool": models.pool,
        "held": {
            worker: (h.incarnation, h.number, h.trust, dict(holders.index.held(worker)), h.report, h.report_parts)
            for worker, h in holders.workers.items()
        },
        "blocks": holders.index.index.keys(),
        "chains": holders.chains,
        "open": list(holders.open.items()),
        "ended": list(holders.ended.items()),
        "incarnations": holders.incarnations,
        "lost_routers": list(holders.lost_routers),
        "parameters": models.parameters,
        "sources": models.sources,
        "runs": {worker: runs for worker, runs in models.runs.items() if runs.runs},
        "reports": {worker: place for worker, place in models.reports.items() if holders.workers[worker].report_parts},
    }


@pytest.mark.parametrize(("seed", "ended_blocks_max"), [(0, 1_000_000), (1, 40), (2, 200)])
async def test_a_restart_anywhere_finds_the_state_that_was_there(
    writer: RecordWriter, seals: Seals, seed: int, ended_blocks_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (holders_fold, loading):
        monkeypatch.setattr(module, "ENDED_BLOCKS_MAX", ended_blocks_max)
    chance = random.Random(seed)
    arrivals = seals.arrivals(eventful())
    while arrivals:
        size = chance.choice((1, 1, 2, 5, 40))
        await writer.write(arrivals[:size])
        arrivals = arrivals[size:]
        writer.models.check()
        found = await load(writer.connection)
        assert told_by(found) == told_by(writer.models), f"after {writer.checkpoint.stream_seq}"
        if chance.random() < 0.3:
            await writer.restart()


async def test_batches_and_restarts_leave_no_trace_in_the_tables(writer: RecordWriter, seals: Seals) -> None:
    arrivals = seals.arrivals(eventful())
    for at in range(0, len(arrivals), 7):
        await writer.write(arrivals[at : at + 7])
        await writer.restart()
    live = await tables(writer.connection)
    with pytest.raises(LedgerActive):
        await active(writer)
    await writer.connection.execute("SELECT pg_advisory_unlock_all()")
    assert await rebuild(writer.url) == len(arrivals)
    rebuilt = await tables(writer.connection)
    for table, rows in live.items():
        assert rebuilt[table] == rows, table
    assert all(live.values()), "every table has had something to say"


async def active(writer: RecordWriter) -> None:
    from services.ledger.database import ACTIVE_LOCK

    assert await writer.connection.fetchval("SELECT pg_try_advisory_lock($1)", ACTIVE_LOCK)
    await rebuild(writer.url)


async def test_rows_of_requests_and_epochs(writer: RecordWriter, seals: Seals) -> None:
    await writer.write(seals.arrivals(eventful()))
    found = await tables(writer.connection)
    requests = {row["request"]: row for row in found["requests"]}
    assert requests["lost-1"]["ended"] == "router-lost", "the first end counts"
    assert requests["late"]["ended"] == "router-lost", "its router had been lost before"
    assert requests["last"]["ended"] is None
    assert requests["open-1"]["attempts"] == 1
    assert requests["open-1"]["worker"] == W0
    assert requests["open-1"]["price_us"] is None, "it had no candidates"
    done = next(row for row in found["requests"] if row["ended"] == "completed")
    assert (done["end_reason"], done["ttft_us"], done["predicted_service_us"], done["prefill_us"]) == (
        "stop",
        95_000,
        90_000,
        80_000,
    )
    assert [(row["epoch"], row["status"]) for row in found["epochs"]] == [
        (1, "committed"),
        (2, "aborted"),
        (3, "committed"),
        (4, "committed"),
    ]
    assert found["epochs"][1]["reason"] == "draining: too slow"
    priced = next(each.fact for each in eventful() if isinstance(each.fact, RequestAssigned) and each.fact.candidates)
    assert requests[priced.request]["price_us"] == priced.candidates[0].price_us
    assert [(row["operation"], row["status"]) for row in found["replicas"]] == [
        ("op-1", "installed"),
        ("op-2", "failed"),
        ("op-3", "requested"),
    ]
    assert orjson.loads(found["parameters"][1]["value"])["frozen"] is True
    errors = [row["error"] for row in found["unfolded"]]
    assert len(errors) == 2, errors
    assert errors[0] == "a field has the wrong form"
    assert "at most 256" in errors[1]


async def test_bytes_that_are_no_event_and_repeats_are_rows(writer: RecordWriter, seals: Seals) -> None:
    first = seals.arrivals([Told("router", received("r", 64), "r")])
    again = seals.arrival(first[0].raw)
    other = seals.arrivals([Told("router", assigned("r", W0, 64), "r")])
    renumbered = seals.arrival(orjson.dumps(orjson.loads(other[0].raw) | {"source_seq": 3}))
    strange = [seals.arrival(raw) for raw in (b"", b"\xff\x00", b'{"a":"\\u0000"}', b"[]")]
    added = await writer.write([*first, again, *other, renumbered, *strange])
    assert {table: len(rows) for table, rows in added.rows.items()} == {"decisions": 6, "block_events": 0, "repeats": 2}
    await writer.restart()
    kept = await writer.connection.fetch("SELECT raw FROM decisions WHERE type = 'unreadable' ORDER BY stream_seq")
    assert [row["raw"] for row in kept] == [each.raw for each in strange]
    late = await writer.write([seals.arrival(first[0].raw)])
    assert len(late.rows["repeats"]) == 1, "also after a restart"


async def test_a_recorded_id_under_another_number_is_a_repeat_once_it_is_known(
    writer: RecordWriter, seals: Seals
) -> None:
    first = seals.arrivals([Told("router", received("r", 64), "r")])
    await writer.write(first)
    fields = orjson.loads(first[0].raw)
    again = [seals.arrival(orjson.dumps(fields | {"source_seq": 2}))]
    await writer.restart()
    with pytest.raises(asyncpg.UniqueViolationError):
        await writer.write(again)
    await writer.restart()
    added = await writer.write(again, {UUID(fields["id"])})
    assert {table: len(rows) for table, rows in added.rows.items()} == {"decisions": 0, "block_events": 0, "repeats": 1}


async def test_an_unknown_type_is_recorded_whole(writer: RecordWriter, seals: Seals) -> None:
    fields = orjson.loads(seals.arrivals([Told("router", received("r", 64), "r")])[0].raw)
    raw = orjson.dumps(fields | {"type": "request-teleported", "version": 3, "data": {"where": ["mars"]}})
    await writer.write([Arrival(1, raw)])
    row = await writer.connection.fetchrow("SELECT type, version, raw FROM decisions")
    assert tuple(row) == ("request-teleported", 3, raw)
    assert await writer.connection.fetchval("SELECT count(*) FROM unfolded") == 0


async def test_a_commit_that_names_a_worker_twice_does_not_stop_the_record(writer: RecordWriter, seals: Seals) -> None:
    good = committed(composition=(4, 4))
    twice = good.model_copy(update={"workers": good.workers * 2})
    told = [registered(), twice, committed(epoch=2, composition=(8,))]
    await writer.write(seals.arrivals(Told("controller", each) for each in told[:2]))
    await writer.write(seals.arrivals(Told("controller", each) for each in told[2:]))
    assert [row["worker"] for row in (await tables(writer.connection))["workers"]] == ["n0/2/0"]


def test_the_story_has_every_kind_of_end() -> None:
    told = [each.fact for each in eventful()]
    for kind in (RequestCompleted, RequestAssigned, RouterLost):
        assert any(isinstance(each, kind) for each in told)
    assert RequestId("last") in {getattr(each, "request", None) for each in told}
