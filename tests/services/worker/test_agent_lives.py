"""Deaths, restarts and shutdowns of a node, over the in-memory log and bus, with the modelled engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from services.worker.agent import NodeAgent
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import EngineError, PrefillStep, StepResult
from shared.contracts.commands import Adopt, NodeLoad
from shared.contracts.events import (
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    PrefillAborted,
    PrefillCompleted,
)
from tests.services.worker.scripted import NODE, ROUTER, SMALL, SUBJECTS, World, kill, prompt, running, worker


def lives(world: World) -> list[tuple[str, int]]:
    return [(each.TYPE, each.incarnation) for each in world.events(NodeRegistered, NodeLost)]


async def three_stages(world: World) -> None:
    """One job that streams, one in its prefill, one that waits."""
    await world.ask(world.assignment("streams", prompt(20), max_new_tokens=1_000, decode=True))
    await world.clock.advance(0.2)
    await world.ask(world.assignment("runs", prompt(500)))
    await world.ask(world.assignment("waits", prompt(500)))
    await world.clock.advance(0.1)


async def test_a_dead_engine_is_said_at_once_to_the_log_and_to_every_router() -> None:
    world = World()
    async with running(world):
        await three_stages(world)
        await world.engines[-1].close()
        await world.clock.advance(0.0)
        assert lives(world)[:2] == [("node-registered", 1), ("node-lost", 1)]
        ends = {each.request: each.reason for each in world.events(PrefillAborted)}
        assert ends == {"runs": "engine-died", "waits": "engine-died"}
        assert [each.correlation for each in world.envelopes()][-3:] == [None, "runs", "waits"]
        for request in ("streams", "runs", "waits"):
            assert world.of(request)[-1].error == "engine-died"
        assert world.of("streams")[-1].index == sum(len(frame.tokens) for frame in world.of("streams"))


async def test_routers_are_told_of_a_death_once_the_log_has_it() -> None:
    """One that was told earlier would place the request on the dead node again."""
    world = World()
    on_the_log: list[bool] = []

    async def told(_subject: str, _payload: bytes) -> None:
        on_the_log.append(bool(world.events(NodeLost)))

    async with running(world):
        await world.ask(world.assignment("runs", prompt(500)))
        await world.bus.subscribe(SUBJECTS.all_frames(ROUTER), told)
        await world.engines[-1].close()
        await world.clock.advance(0.0)
        assert on_the_log == [True]


async def test_routers_are_told_of_a_death_even_if_the_log_is_away() -> None:
    world = World()
    async with running(world) as agent:
        await world.ask(world.assignment("runs", prompt(500)))
        agent._ports.outbox._publisher.cancel()
        await world.engines[-1].close()
        await world.clock.advance(0.4)
        assert world.frames == []
        await world.clock.advance(0.6)
        assert world.of("runs")[-1].error == "engine-died"


async def test_the_next_life_has_the_next_number_and_the_committed_composition() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(64)))
        await world.clock.advance(0.5)
        await world.engines[-1].close()
        await world.clock.advance(2.0)
        again = world.events(NodeRegistered)[-1]
        assert (again.incarnation, again.epoch, again.composition) == (2, 1, (1, 1, 2))
        await world.ask(world.assignment("b", prompt(64)))
        await world.clock.advance(0.5)
        assert world.of("b")[0].cached_tokens == 0, "a new life begins with empty caches"
        assert world.state.numbers == {worker(0): 1}, "and with its own numbers"


async def test_engines_that_keep_dying_young_are_restarted_ever_more_slowly() -> None:
    world = World()
    async with running(world):
        for _ in range(200):
            await world.engines[-1].close()
            await world.clock.advance(0.5)
        assert 5 <= len(world.engines) <= 10, "0, 1, 5, 15, 30 and 30 s apart"


async def test_an_engine_that_has_lived_for_long_is_restarted_at_once() -> None:
    world = World()
    async with running(world) as agent:
        for lived_s in (10, 10, 10, 70):
            await world.clock.advance(lived_s)
            await world.engines[-1].close()
        await world.clock.advance(0.1)
        assert (len(world.engines), agent.ready()) == (5, None)


class Unstartable(ModelledEngine):
    """An engine whose first two starts fail, as on a disk that is not mounted yet."""

    starts = 0

    async def start(self) -> None:
        Unstartable.starts += 1
        if Unstartable.starts < 3:
            raise EngineError("model_dir: not there")
        await super().start()


async def test_an_engine_that_does_not_start_is_tried_again_and_never_registered() -> None:
    world = World()
    Unstartable.starts = 0
    world.engine_class = Unstartable
    async with running(world, None) as agent:
        assert "model_dir: not there" in str(agent.ready())
        assert (await world.ask(world.assignment("a", prompt(10)))).reason == "unknown-worker"
        assert lives(world) == []
        await world.clock.advance(5.0)
        assert lives(world) == [("node-registered", 1)]
        assert agent.ready() is None


class Hanging(ModelledEngine):
    """An engine whose first step never returns."""

    hung = False

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        if not Hanging.hung:
            Hanging.hung = True
            await asyncio.Event().wait()
        return await super().prefill(step, noted)


async def test_a_hung_step_counts_as_a_death() -> None:
    world = World()
    Hanging.hung = False
    world.engine_class = Hanging
    async with running(world):
        await world.ask(world.assignment("hangs", prompt(600)))
        await world.ask(world.assignment("waits", prompt(600)))
        await world.clock.advance(5.9)
        assert len(lives(world)) == 1, "ten times its prediction of 0.6 s, which is more than the minimum of 5 s"
        await world.clock.advance(0.2)
        assert lives(world) == [("node-registered", 1), ("node-lost", 1), ("node-registered", 2)]
        assert "hung step of n0/1/0" in world.events(NodeLost)[0].reason
        assert {frame.request for frame in world.frames if frame.error} == {"hangs", "waits"}


async def test_a_node_that_was_given_up_comes_back_as_another_incarnation() -> None:
    world = World()
    async with running(world):
        await three_stages(world)
        await world.decide(NodeDeclaredLost(node=NODE, incarnation=1, silent_us=3_000_000))
        await world.clock.advance(2.0)
        assert lives(world) == [("node-registered", 1), ("node-registered", 2)], "nobody is told twice"
        assert len(world.state.desk) == 0


async def test_a_late_declaration_does_not_end_the_life_after() -> None:
    world = World()
    async with running(world):
        await world.engines[-1].close()
        await world.clock.advance(2.0)
        await world.decide(NodeDeclaredLost(node=NODE, incarnation=1, silent_us=3_000_000))
        await world.clock.advance(2.0)
        assert lives(world)[-1] == ("node-registered", 2)


async def test_a_restarted_process_ends_its_predecessor_and_goes_on() -> None:
    world = World()
    async with running(world) as first:
        await world.ask(world.assignment("a", prompt(500)))
        await world.clock.advance(0.1)
        await kill(first)
        await world.engines[-1].close()
        await world.bus.close()
        await world.listen()
        second = world.new_agent()
        await second.start()
        await world.clock.advance(1.0)
        assert lives(world) == [("node-registered", 1), ("node-lost", 1), ("node-registered", 2)]
        again = world.events(NodeRegistered)[-1]
        assert (again.epoch, again.composition) == (1, (1, 1, 2))
        await world.ask(world.assignment("a", prompt(500), attempt=2))
        await world.clock.advance(1.0)
        assert [frame.attempt for frame in world.of("a")] == [2]
        await kill(second)


async def test_other_ranks_than_the_committed_composition_has_boot_without_workers() -> None:
    world = World()
    async with running(world) as first:
        await kill(first)
        world.node = replace(SMALL, prefill_ranks=8)
        await world.bus.close()
        second = world.new_agent()
        await second.start()
        await world.clock.advance(1.0)
        again = world.events(NodeRegistered)[-1]
        assert (again.prefill_ranks, again.epoch, again.composition) == (8, 0, ())
        await kill(second)


async def test_sigterm_gives_back_what_waits_and_lets_the_rest_end() -> None:
    world = World()
    async with running(world) as agent:
        await world.ask(world.assignment("streams", prompt(20), max_new_tokens=50, decode=True))
        await world.clock.advance(0.2)
        await world.ask(world.assignment("runs", prompt(500)))
        await world.ask(world.assignment("waits", prompt(500)))
        stopping = asyncio.ensure_future(agent.stop(8.0))
        await world.clock.advance(0.1)
        assert world.of("waits")[-1].error == "draining"
        assert not world.pool().schedulable(world.pool().workers[worker(1)]), "nothing more is placed on it"
        switch = Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(4,))
        assert (await world.ask(switch)).reason == "draining"
        assert (await world.ask(world.assignment("late", prompt(10)))).reason == "draining"
        await world.clock.advance(2.0)
        assert stopping.done()
        assert world.of("runs")[-1].finish == world.of("streams")[-1].finish == "length"
        assert world.events()[-1] == NodeLost(node=NODE, incarnation=1, reason="shutdown")


async def test_sigterm_does_not_wait_for_ever() -> None:
    world = World()
    async with running(world) as agent:
        await three_stages(world)
        await world.ask(world.assignment("long", prompt(900), at=worker(1)))
        stopping = asyncio.ensure_future(agent.stop(0.5))
        await world.clock.advance(1.0)
        assert stopping.done()
        assert len(world.events(PrefillCompleted)) == 2, "the stream's own, and the one that ended in time"
        assert world.of("long")[-1].error == world.of("streams")[-1].error == "draining"
        assert lives(world)[-1] == ("node-lost", 1)


async def test_the_heartbeat_says_what_the_node_does() -> None:
    world = World()
    beats: list[NodeLoad] = []

    async def heard(_subject: str, payload: bytes) -> None:
        beats.append(NodeLoad.model_validate_json(payload))

    async with running(world):
        await world.bus.subscribe(SUBJECTS.loads, heard)
        await world.ask(world.assignment("done", prompt(64), at=worker(1)))
        await world.clock.advance(0.5)
        for index in range(3):
            await world.ask(world.assignment(f"r{index}", prompt(900, seed=index)))
        await world.clock.advance(1.0)
        assert len(beats) in (1, 2)
        last = beats[-1]
        assert (last.node, last.incarnation, last.epoch) == (NODE, 1, 1)
        assert last.queued[worker(0)] == 2
        assert last.running == {worker(0): "r0"}
        assert last.steps == {worker(0): ("r0",)}
        assert (last.used_blocks, last.free_blocks) == (4, 4 * 64 - 4)


async def test_nobody_hears_of_a_node_without_a_life() -> None:
    world = World()
    beats: list[bytes] = []

    async def heard(_subject: str, payload: bytes) -> None:
        beats.append(payload)

    Unstartable.starts = -1_000
    world.engine_class = Unstartable
    async with running(world, None):
        await world.bus.subscribe(SUBJECTS.loads, heard)
        await world.clock.advance(5.0)
        assert beats == []


async def test_a_second_agent_under_the_same_name_ends_the_first() -> None:
    """One process per node may speak for it: whoever finds that another has registered must stop, not fight."""
    world = World()
    async with running(world) as first:
        failing = asyncio.ensure_future(first.failed())
        second: NodeAgent = world.new_agent()
        await second.start()
        await world.clock.advance(0.5)
        assert failing.done()
        assert "worker-2 has registered node n0" in str(failing.result())
        await kill(second)
