"""Engines whose caches change by themselves, or that serve some compositions only: what the agent makes of it."""

from dataclasses import replace

from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import EngineDescription
from shared.contracts.commands import Adopt
from shared.contracts.events import BlocksEvicted, CacheReported, NodeRegistered, PrefillCompleted
from shared.contracts.ids import NodeId, RequestId, unpack_block_ids, worker_id
from shared.model.lattice import Group
from tests.services.worker.scripted import NODE, World, committed, prompt, running, worker
from tests.services.worker.test_agent_requests import folded_holders, held_by_engine, holdings


class OfOneDegree(ModelledEngine):
    """As SGLang servers without our plug-in: degree 2, and KV that nobody can read."""

    def describe(self) -> EngineDescription:
        return replace(super().describe(), degrees=(2,), moves_kv=False)


async def test_what_left_a_cache_by_itself_is_told_with_the_next_heartbeat() -> None:
    world = World()
    async with running(world):
        assign = world.assignment("r1", prompt(32 * 16))
        await world.ask(assign)
        await world.clock.advance(2.0)
        engine = world.engines[0]
        engine._pool.reserve(RequestId("decode"), Group(0, 1), (), 48 * 16)
        assert world.events(BlocksEvicted) == []
        await world.clock.advance(1.1)
        (gone,) = world.events(BlocksEvicted)
        assert isinstance(gone, BlocksEvicted)
        assert (gone.worker, gone.cause) == (worker(0), "pressure")
        told = unpack_block_ids(gone.block_ids)
        assert told == list(reversed(unpack_block_ids(assign.block_ids)))[: len(told)]
        await world.clock.advance(5.0)
        assert len(world.events(BlocksEvicted)) == 1
        engine.release(RequestId("decode"))


async def test_what_leaves_between_a_switch_and_its_commit_is_no_drift() -> None:
    """Of the new worker nobody has been told anything that it could take back."""
    world = World()
    async with running(world):
        await world.ask(world.assignment("r1", prompt(32 * 16)))
        await world.clock.advance(2.0)
        switch = Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(1, 1, 1, 1))
        assert (await world.ask(switch, within_s=2.0)).kind == "accepted"
        engine = world.engines[0]
        engine._pool.reserve(RequestId("decode"), Group(0, 1), (), 48 * 16)
        await world.decide(committed(2, (1, 1, 1, 1)))
        reports = [each for each in world.events(CacheReported) if isinstance(each, CacheReported)]
        assert [each.number for each in reports if each.worker == worker(0, 2)] == [0]
        await world.clock.advance(1.1)
        assert world.events(BlocksEvicted), "told with the next heartbeat"
        assert holdings(world) == held_by_engine(world)
        assert folded_holders(world).drifted_blocks == 0
        engine.release(RequestId("decode"))


async def test_an_engine_that_reads_no_kv_computes_what_it_was_to_fetch() -> None:
    world = World(engine_class=OfOneDegree)
    async with running(world, (2, 2)):
        source = worker_id(NodeId("other"), 1, 0)
        await world.ask(world.assignment("a", prompt(10 * 16 + 5), fetch_from=source, fetch_blocks=10))
        await world.clock.advance(2.0)
        (done,) = world.events(PrefillCompleted)
        assert isinstance(done, PrefillCompleted)
        assert (done.computed_tokens, done.fetch_us, done.fetch_fallback) == (165, 0, "computes")


async def test_a_composition_of_other_degrees_is_not_booted() -> None:
    world = World(engine_class=OfOneDegree)
    await world.decide(committed(1, (1, 1, 2)))
    async with running(world, composition=None):
        (registered,) = world.events(NodeRegistered)
        assert isinstance(registered, NodeRegistered)
        assert (registered.epoch, registered.degrees, registered.fetches) == (0, (2,), False)


async def test_a_composition_of_its_degree_is() -> None:
    world = World(engine_class=OfOneDegree)
    await world.decide(committed(1, (2, 2)))
    async with running(world, composition=None):
        await world.clock.advance(1.0)
        (registered,) = world.events(NodeRegistered)
        assert isinstance(registered, NodeRegistered)
        assert (registered.epoch, registered.composition) == (1, (2, 2))
