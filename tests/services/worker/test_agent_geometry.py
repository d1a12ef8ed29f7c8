"""Drains and switches at an agent, over the in-memory log and bus, with the modelled engine."""

import pytest

from services.worker.composer import StepLimits
from services.worker.engine import modelled
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import RankAdopted, RolledBack
from services.worker.switching import HOLD_S
from shared.contracts.commands import Adopt, Drain
from shared.contracts.events import (
    CacheReported,
    DrainCompleted,
    EpochAborted,
    LeadershipTaken,
    PrefillAborted,
    PrefillCompleted,
    RankAdoptedEpoch,
)
from shared.contracts.ids import WorkerId
from shared.model.lattice import Composition
from tests.services.worker.scripted import NODE, World, prompt, running, worker


def order(*workers: WorkerId, term: int = 1) -> Drain:
    return Drain(term=term, epoch=2, workers=workers, deadline_us=15_000_000)


async def test_a_drain_returns_what_waits_finishes_what_runs_and_says_so() -> None:
    world = World()
    async with running(world):
        for index in range(3):
            await world.ask(world.assignment(f"r{index}", prompt(500, seed=index)))
        await world.clock.advance(0.1)
        assert (await world.ask(order(worker(0), worker(1)))).kind == "accepted"
        assert [(each.request, each.reason) for each in world.events(PrefillAborted)] == [
            ("r1", "draining"),
            ("r2", "draining"),
        ]
        assert [(frame.request, frame.error) for frame in world.frames] == [("r1", "draining"), ("r2", "draining")]
        assert (await world.ask(world.assignment("late", prompt(10)))).reason == "draining"
        await world.clock.advance(0.3)
        assert world.events(DrainCompleted) == []
        await world.clock.advance(0.2)
        assert world.events(DrainCompleted) == [
            DrainCompleted(
                node=NODE, node_epoch=1, workers=(worker(0), worker(1)), returned_requests=2, drain_us=400_000
            )
        ]
        assert [each.correlation for each in world.envelopes()][-1] == "n0/2", "the epoch it is for"
        assert len(world.of("r0")) == 1, "what ran was served"


async def test_a_repeated_drain_is_completed_once() -> None:
    world = World()
    async with running(world):
        for _ in range(3):
            assert (await world.ask(order(worker(0)))).kind == "accepted"
            await world.clock.advance(1.0)
        assert len(world.events(DrainCompleted)) == 1


async def test_other_workers_serve_during_a_drain_and_are_held_at_its_end() -> None:
    """The switch moves all ranks of the node, so it must find all of them between steps."""
    world = World(step_limits=StepLimits(256, 256))
    async with running(world):
        await world.ask(world.assignment("retires", prompt(250)))
        for index in range(3):
            await world.ask(world.assignment(f"stays{index}", prompt(200, seed=index), at=worker(2)))
        await world.ask(order(worker(0), worker(1)))
        await world.clock.advance(0.35)
        assert world.events(DrainCompleted) == [], "the step that began at 0.2 s delays the end of the drain"
        await world.clock.advance(0.1)
        assert len(world.events(DrainCompleted)) == 1
        assert (await world.adopt(2, (2, 2))).kind == "accepted"
        assert [(each.request, each.reason) for each in world.events(PrefillAborted)] == [("stays2", "draining")]
        assert len(world.events(PrefillCompleted)) == 3


async def test_workers_that_were_held_go_on_when_no_switch_comes() -> None:
    world = World()
    async with running(world):
        await world.ask(order(worker(0), worker(1)))
        await world.ask(world.assignment("held", prompt(100), at=worker(2)))
        await world.clock.advance(2.0)
        assert world.frames == []
        await world.clock.advance(1.5)
        assert len(world.of("held")) == 1
        assert (await world.ask(world.assignment("late", prompt(10)))).reason == "draining", "not reopened by itself"


async def test_an_aborted_reconfiguration_gives_the_old_workers_back() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("runs", prompt(500)))
        await world.ask(order(worker(0), worker(1)))
        await world.decide(EpochAborted(node=NODE, epoch=2, step="draining", reason="took longer than 15 s"))
        await world.clock.advance(0.01)
        assert (await world.ask(world.assignment("again", prompt(10)))).kind == "accepted"
        await world.clock.advance(1.0)
        assert world.events(DrainCompleted) == []
        assert len(world.of("again")) == 1


async def test_a_new_life_takes_work_at_a_worker_that_was_draining() -> None:
    world = World()
    async with running(world):
        await world.ask(order(worker(0)))
        await world.engines[-1].close()
        await world.clock.advance(0.5)
        assert (await world.ask(world.assignment("a", prompt(10)))).kind == "accepted"


async def test_a_switch_keeps_the_blocks_and_the_new_workers_report_them() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(160), at=worker(1)))
        await world.clock.advance(0.5)
        await world.ask(order(worker(0), worker(1)))
        await world.clock.advance(0.1)
        await world.adopt(2, (2, 2))
        assert world.state.held_blocks == {worker(0, epoch=2): 10, worker(2, epoch=2): 0}
        reports = [each for each in world.events(CacheReported) if each.worker == worker(0, epoch=2)]
        assert len(reports) == 1
        assert len(reports[0].runs[0].block_ids) == 10 * 16
        await world.ask(world.assignment("b", prompt(160), at=worker(0, epoch=2)))
        await world.clock.advance(0.5)
        assert world.of("b")[0].cached_tokens == 144
        assert (await world.ask(world.assignment("c", prompt(16), at=worker(0, epoch=1)))).reason == "stale-epoch"


async def test_a_switch_ends_the_hold_of_its_drain() -> None:
    """What opened the gate after 3 s would let a step slip into the next switch."""
    world = World()
    async with running(world):
        await world.ask(order(worker(0), worker(1)))
        await world.adopt(2, (2, 2))
        for index in range(2):
            await world.ask(world.assignment(f"r{index}", prompt(1_300, seed=index), at=worker(0, epoch=2)))
        await world.clock.advance(0.5)
        switch = Adopt(term=1, node=NODE, incarnation=1, epoch=3, composition=(4,))
        assert (await world.ask(switch, within_s=1.0)).kind == "accepted"


async def test_every_rank_says_that_it_has_adopted_before_the_answer() -> None:
    world = World()
    async with running(world):
        switch = Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(4,))
        assert (await world.ask(switch, within_s=0.1)).kind == "accepted"
        adopted = [each for each in world.events(RankAdoptedEpoch) if each.epoch == 2]
        assert [each.rank for each in adopted] == [0, 1, 2, 3]
        assert all(each.switch_us > 0 for each in adopted)
        assert (await world.ask(switch)).kind == "accepted", "a repetition does nothing and is answered alike"
        assert len(world.events(RankAdoptedEpoch)) == 8
        told = [each.correlation for each in world.envelopes() if each.type == "rank-adopted-epoch"]
        assert told == ["n0/1"] * 4 + ["n0/2"] * 4


async def test_a_switch_is_answered_only_when_the_log_has_it() -> None:
    world = World()
    async with running(world) as agent:
        agent._ports.outbox._publisher.cancel()
        with pytest.raises(AssertionError, match="no answer to adopt"):
            await world.ask(Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(4,)), within_s=5.0)


async def test_a_switch_waits_a_little_for_the_steps_that_run() -> None:
    world = World()
    async with running(world):
        for index in range(2):
            await world.ask(world.assignment(f"r{index}", prompt(1_000, seed=index)))
        await world.clock.advance(0.1)
        switch = Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(4,))
        assert (await world.ask(switch, within_s=0.95)).kind == "accepted"
        assert len(world.of("r0")) == 1
        assert world.of("r1")[-1].error == "draining"


async def test_a_step_that_outlasts_the_switch_is_not_disturbed() -> None:
    world = World()
    async with running(world, (4,)):
        await world.ask(world.assignment("long", prompt(3_000)))
        await world.clock.advance(0.1)
        switch = Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(2, 2))
        reply = await world.ask(switch, within_s=2.0)
        assert (reply.kind, reply.reason) == ("refused", "busy")
        assert worker(0) in reply.detail
        await world.clock.advance(2.0)
        assert len(world.of("long")) == 1
        assert world.state.served.epoch == 1


class Reluctant(ModelledEngine):
    """Its ranks are not all ready for epoch 2."""

    async def adopt(self, epoch: int, composition: Composition) -> tuple[RankAdopted, ...]:
        if epoch == 2:
            raise RolledBack("ranks [1] were not ready")
        return await super().adopt(epoch, composition)


async def test_a_switch_that_was_rolled_back_is_refused_and_the_old_workers_serve() -> None:
    world = World(engine_class=Reluctant)
    async with running(world):
        await world.ask(world.assignment("before", prompt(100), at=worker(2)))
        await world.ask(order(worker(0), worker(1)))
        await world.clock.advance(0.2)
        assert len(world.events(DrainCompleted)) == 1
        await world.ask(world.assignment("held", prompt(100, seed=1), at=worker(2)))
        for _ in range(2):
            refusal = await world.adopt(2, (4,))
            assert (refusal.kind, refusal.reason) == ("refused", "engine")
            assert "ranks [1]" in refusal.detail
        assert {each.epoch for each in world.events(RankAdoptedEpoch)} == {1}
        assert world.state.served.epoch == 1
        assert len(world.of("held")) == 1, "workers that do not retire go on at once"
        assert (await world.ask(world.assignment("late", prompt(10)))).reason == "draining"
        await world.decide(EpochAborted(node=NODE, epoch=2, step="switching", reason="took longer than 2 s"))
        assert (await world.ask(world.assignment("again", prompt(10)))).kind == "accepted"
        await world.clock.advance(0.1)
        assert len(world.of("again")) == 1
        assert (await world.adopt(3, (4,))).kind == "accepted"
        assert {each.epoch for each in world.events(RankAdoptedEpoch)} == {1, 3}
        assert len(world.engines) == 1, "nothing has died"


async def test_an_old_leader_is_not_obeyed() -> None:
    world = World()
    async with running(world):
        await world.decide(LeadershipTaken(leader="c2", term=5))
        assert (await world.ask(order(worker(0), term=4))).reason == "stale-term"
        assert (await world.adopt(2, (4,), term=4)).reason == "stale-term"
        assert (await world.adopt(2, (4,), term=6)).kind == "accepted"
        assert (await world.ask(order(worker(0, epoch=2), term=5))).reason == "stale-term", "orders teach terms too"


async def test_decoding_goes_on_through_a_switch() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(64), max_new_tokens=50, decode=True))
        await world.clock.advance(0.5)
        await world.adopt(2, (4,))
        await world.clock.advance(2.0)
        tokens = [token for frame in world.of("a") for token in frame.tokens]
        assert len(tokens) == 50
        assert world.of("a")[-1].finish == "length"


async def test_a_hold_that_runs_out_during_the_switch_starts_no_step_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    async with running(world):
        await world.ask(order(worker(0), worker(1)))
        await world.ask(world.assignment("held", prompt(100), at=worker(2)))
        await world.clock.advance(HOLD_S - 0.5)
        monkeypatch.setattr(modelled, "ADOPT_S", 1.0)
        assert (await world.adopt(2, (4,))).kind == "accepted"
        assert [(each.request, each.reason) for each in world.events(PrefillAborted)] == [("held", "draining")]
