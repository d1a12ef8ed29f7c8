"""Engines whose caches change by themselves, or that serve some compositions only: what the agent makes of it."""

from dataclasses import replace

from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import EngineDescription
from shared.contracts.events import BlocksEvicted, NodeRegistered
from shared.contracts.ids import RequestId, unpack_block_ids
from shared.model.lattice import Group
from tests.services.worker.scripted import World, committed, prompt, running, worker


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
