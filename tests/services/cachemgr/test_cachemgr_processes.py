"""Cache managers as real processes on a real NATS server; the agents are the test's own."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cache_world import block, chain

from cli.embedded.nats import EmbeddedNats
from shared.contracts.commands import Accepted, Refused, Report, decode_command, encode_message
from shared.contracts.copy_commands import Copied, Copy
from shared.contracts.events import (
    BlockRun,
    BlocksStored,
    CacheLeadershipTaken,
    CacheReported,
    CacheScanCompleted,
    ParametersChanged,
    PlacementReconciled,
    ReconfigurationPlanned,
    ReplicaInstalled,
    ReplicationFailed,
    ReplicationRequested,
)
from shared.contracts.ids import NodeId, WorkerId
from tests.support.replica import Replica, Witness, eventually, witness
from tests.support.story import adopted, assigned, committed, prefilled, received, registered

N0, W = NodeId("n0"), WorkerId("n0/1/0")


@pytest.fixture
def managers(nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[list[Replica]]:
    """Two cache managers, not started."""
    replicas = [Replica("cachemgr", nats_server, tmp_path, each) for each in ("1", "2")]
    yield replicas
    for each in replicas:
        each.stop(kill=True)


def stored(names: str, number: int = 1) -> BlocksStored:
    run = BlockRun(block_ids=b"".join(chain(names)))
    blocks = len(chain(names))
    return BlocksStored(worker=W, incarnation=1, number=number, cause="replication", blocks=blocks, runs=(run,))


async def a_serving_node(seeing: Witness) -> None:
    await seeing.tell(registered("n0", ranks=2), *adopted("n0", 1, ranks=2), sender="n0")
    await seeing.tell(committed("n0", 1, (1, 1)), sender="controller")


async def test_a_standby_goes_on_counting_where_the_dead_leader_stopped(
    nats_server: EmbeddedNats, managers: list[Replica]
) -> None:
    first, second = managers
    async with witness(nats_server) as seeing:
        first.start()
        await eventually(lambda: seeing.all(CacheLeadershipTaken))
        second.start()
        await eventually(second.ready)
        await a_serving_node(seeing)
        await seeing.tell(stored("a b c"), sender="n0")
        await seeing.tell(received("r", 250, block_ids=b"".join(chain("a b"))), sender="router-1")
        await seeing.tell(assigned("r", W, 50, 200), sender="router-1")
        await seeing.tell(prefilled("r", W, 50, cached_own_tokens=200), sender="n0")
        await eventually(lambda: any(each.holders == 3 for each in seeing.all(CacheScanCompleted)))

        first.stop(kill=True)
        await eventually(lambda: len(seeing.all(CacheLeadershipTaken)) == 2)
        old, new = seeing.all(CacheLeadershipTaken)
        assert new.term > old.term
        known = len(seeing.all(CacheScanCompleted))
        await eventually(lambda: len(seeing.all(CacheScanCompleted)) >= known + 2)
        numbers = [each.scan for each in seeing.all(CacheScanCompleted)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert second.resident_mib < 90

        async with httpx.AsyncClient(base_url=second.url) as http:
            answer = (await http.get("/v1/prefixes?limit=1")).json()
            assert answer["nodes"] == 3
            [hottest] = answer["prefixes"]
            assert (hottest["block"], hottest["parent"], hottest["depth"]) in [
                (block("a").hex(), None, 0),
                (block("b").hex(), block("a").hex(), 1),
            ]
            assert (hottest["holders"], hottest["replicas"]) == ([W], {"1": 1})
            assert (await http.get("/v1/prefixes?limit=0")).status_code == 422
            assert (await http.get("/v1/prefixes?limit=1001")).status_code == 422


async def test_who_is_started_again_goes_on_from_what_the_last_leader_kept(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    first, second = (
        Replica("cachemgr", nats_server, tmp_path, each, VERTUMNUS_SNAPSHOT_EVERY_S="0.2") for each in ("1", "2")
    )
    async with witness(nats_server) as seeing, httpx.AsyncClient() as http:

        async def shown(replica: Replica, name: str) -> int:
            lines = (await http.get(f"{replica.url}/metrics")).text.splitlines()
            return round(
                float(next(each.split()[1] for each in lines if each.startswith(f"vertumnus_cachemgr_{name} ")))
            )

        try:
            first.start()
            await eventually(lambda: seeing.all(CacheLeadershipTaken))
            await a_serving_node(seeing)
            await seeing.tell(stored("a b c"), sender="n0")
            there = seeing.projection.seen_seq
            while await shown(first, "snapshot_seq") < there:
                await seeing.runtime.clock.sleep(0.1)
            first.stop(kill=True)
            await seeing.tell(stored("a b c d", number=2), sender="n0")
            _, last = await seeing.runtime.log.bounds()
            second.start()
            await eventually(second.ready)
            resumed = await shown(second, "resumed_seq")
            assert resumed >= there
            assert await shown(second, "start_events") == last - resumed
            await eventually(lambda: any(each.holders == 4 for each in seeing.all(CacheScanCompleted)))
            old, new = seeing.all(CacheLeadershipTaken)
            assert new == old.model_copy(update={"leader": new.leader, "term": new.term}), "of the same beginning"
            assert new.term > old.term
            numbers = [each.scan for each in seeing.all(CacheScanCompleted)]
            assert numbers == list(range(1, len(numbers) + 1))
        finally:
            for each in (first, second):
                each.stop(kill=True)


async def test_a_cache_with_a_gap_is_reported_again(nats_server: EmbeddedNats, managers: list[Replica]) -> None:
    async with witness(nats_server) as seeing:
        asked = []

        async def agent(_subject: str, payload: bytes) -> bytes:
            command = decode_command(payload)
            assert isinstance(command, Report)
            asked.append(command.workers)
            run = BlockRun(block_ids=b"".join(chain("a b")))
            await seeing.tell(
                CacheReported(worker=W, incarnation=1, number=7, part=1, parts=1, runs=(run,)), sender="n0"
            )
            return encode_message(Accepted())

        await seeing.runtime.bus.subscribe(seeing.runtime.subjects.agent(N0), agent)
        await a_serving_node(seeing)
        await seeing.tell(stored("a b", number=7), sender="n0")
        managers[0].start()
        await eventually(lambda: asked)
        assert asked == [(W,)]
        await eventually(lambda: any(each.holders == 2 for each in seeing.all(CacheScanCompleted)))


async def test_placements_are_reconciled_when_every_rank_has_adopted(
    nats_server: EmbeddedNats, managers: list[Replica]
) -> None:
    async with witness(nats_server) as seeing:
        managers[0].start()
        await eventually(managers[0].ready)
        await a_serving_node(seeing)
        await seeing.tell(stored("a b"), sender="n0")
        plan = ReconfigurationPlanned(
            node=N0,
            epoch=2,
            policy="paper",
            reason="x",
            old_composition=(1, 1),
            new_composition=(2,),
            retiring=(W, WorkerId("n0/1/1")),
            coming=(WorkerId("n0/2/0"),),
        )
        await seeing.tell(plan, sender="controller")
        await seeing.tell(*adopted("n0", 2, ranks=2), sender="n0")
        await eventually(lambda: seeing.all(PlacementReconciled))
        [fact] = seeing.all(PlacementReconciled)
        assert fact.workers[0].retained == (BlockRun(block_ids=b"".join(chain("a b"))),)


async def test_a_missed_prefix_is_copied_by_order_and_a_refusal_is_told(
    nats_server: EmbeddedNats, managers: list[Replica]
) -> None:
    """The agent of the degree that lacks it is busy, then refuses, then copies."""
    async with witness(nats_server) as seeing:
        answers = [
            Refused(reason="busy", detail=""),
            Refused(reason="full", detail=""),
            Copied(blocks=2, bytes=1, copy_us=1),
        ]
        asked: list[Copy] = []

        async def agent(_subject: str, payload: bytes) -> bytes:
            command = decode_command(payload)
            assert isinstance(command, Copy)
            asked.append(command)
            answer = answers[min(len(asked), len(answers)) - 1]
            if isinstance(answer, Copied):
                run = BlockRun(block_ids=command.block_ids)
                there = BlocksStored(
                    worker=command.destination, incarnation=1, number=1, cause="replication", blocks=2, runs=(run,)
                )
                await seeing.tell(there, sender="n1")
            return encode_message(answer)

        await seeing.runtime.bus.subscribe(seeing.runtime.subjects.agent(NodeId("n1")), agent)
        managers[0].start()
        await eventually(managers[0].ready)
        await a_serving_node(seeing)
        await seeing.tell(registered("n1", ranks=4), *adopted("n1", 1, ranks=4), sender="n1")
        await seeing.tell(committed("n1", 1, (4,)), sender="controller")
        # After its failure z rests at that worker for 30 scans, through which the demand has to last.
        pace = {"scan_every_s": 0.05, "decay": 0.99}
        wanted = {"cache_policy": "paper", "theta_inter": 0.001, "theta_reclaim": 0.001, **pace}
        changed = ParametersChanged(parameters_version=1, changes=wanted, asked_by="ann", reason="")
        await seeing.tell(changed, sender="controller")
        await seeing.tell(stored("a b"), sender="n0")
        for number in range(30):  # each misses 100 tokens' worth of a degree-4 worker: some tenths of a millisecond
            asks = received(f"r{number}", 25_000, block_ids=b"".join(chain("a b")))
            await seeing.tell(asks, assigned(f"r{number}", W, 24_800, 200, preferred_degree=4), sender="router-1")
        await eventually(lambda: seeing.all(ReplicaInstalled))
        [failed] = seeing.all(ReplicationFailed)
        assert failed.reason == "full"
        first, second = seeing.all(ReplicationRequested)[:2]
        assert (first.z, first.sources, first.destination) == (block("b"), (W,), "n1/1/0")
        assert [each.operation for each in asked] == [first.operation, first.operation, second.operation]
        assert asked[0] == asked[1] == asked[2].model_copy(update={"operation": first.operation})
        assert asked[0].block_ids == b"".join(chain("a b"))
