"""A switch brings every rank along or none: refusals, silence and deaths at every point of it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engine.protocol import EngineDied, EngineError, PrefillStep, RankAdopted, RolledBack, StaleEpoch
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.messages import Abort, Commit, Prefill, Prepare
from services.worker.engine.torch.rank_process import RankProcess
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.switch import Switch
from services.worker.engine.torch.zygote import Zygote
from shared.model.lattice import Group
from tests.services.worker.engine.contract import Node, first_token, prompt
from tests.services.worker.processes import until

VICTIM = 1


class TorchNode(Node):
    """A node whose ranks a test can reach."""

    engine: TorchEngine

    @property
    def ranks(self) -> list[RankProcess]:
        return list(self.engine._ranks.prefill)

    @property
    def switch(self) -> Switch:
        return self.engine._switch

    def number(self) -> int:
        return next(self.engine._numbers)

    async def answered(self, *but: int) -> None:
        """Returns when no rank owes anything, `but` those."""
        await until(
            lambda: not any(rank.owed for rank in self.ranks if rank.rank not in but), "every rank has answered"
        )


Started = Callable[..., Awaitable[TorchNode]]


@pytest.fixture
async def started(tiny_qwen3: Path, zygote: Zygote) -> AsyncIterator[Started]:
    nodes: list[TorchNode] = []

    async def start(**changes: float) -> TorchNode:
        settings = TorchSettings(tiny_qwen3, prefill_ranks=4, block_tokens=8, blocks_per_rank=16)
        nodes.append(TorchNode(TorchEngine(replace(settings, **changes), zygote)))
        await nodes[-1].engine.start()
        return nodes[-1]

    async with asyncio.timeout(60):
        yield start
    for node in nodes:
        await node.engine.close()


async def test_a_rank_refuses_what_is_not_of_its_epoch(started: Started) -> None:
    node = await started()
    await node.adopt(4)
    (group,) = await node.adopt(4)
    rank = node.ranks[VICTIM]
    for command, refusal in {
        Prefill(node.number(), 1, ()): "prefill of epoch 1, but 2 is served",
        Prefill(node.number(), 3, ()): "prefill of epoch 3, but 2 is served",
        Prepare(node.number(), 2, group): "prepare of epoch 2, but 2 is served",
        Commit(node.number(), 3): "epoch 3 was not prepared",
        Prepare(node.number(), 3, Group(2, 2)): "not one of its groups",
        Prepare(node.number(), 3, Group(1, 2)): "not one of its groups",
    }.items():
        with pytest.raises(EngineError, match=f"rank 1: .*{refusal}"):
            await rank.ask(command)
    await node.prefill(group, node.item(prompt(100)))


async def test_one_refusal_keeps_every_rank_where_it_is(started: Started) -> None:
    """A rank that is ahead of the others stands for any that will not come along."""
    node = await started()
    left, right = await node.adopt(2, 2)
    begun = replace(node.item(prompt(60)), until=16)
    await node.prefill(left, begun)
    ahead = node.ranks[3]
    await ahead.ask(Prepare(node.number(), 5, right))
    await ahead.ask(Commit(node.number(), 5))
    for epoch in (2, 5):
        with pytest.raises(
            RolledBack, match=rf"epoch {epoch}: rank 3: .* but 5 is served; epoch 1 is served as before"
        ):
            await node.engine.adopt(epoch, (4,))
    for rank in node.ranks[:3]:
        with pytest.raises(EngineError, match="not prepared"):
            await rank.ask(Commit(node.number(), 5))
    ended = await node.prefill(left, replace(begun, until=None))
    assert ended.cached_tokens == 16, "what was begun goes on"
    with pytest.raises(StaleEpoch):
        await node.engine.prefill(PrefillStep(5, left, (node.item(prompt(20)),)))
    node.epoch = 5
    (merged,) = await node.adopt(4)
    assert (await node.prefill(merged, node.item(prompt(60)))).cached_tokens == 56


async def test_a_silent_rank_keeps_the_others_where_they_are(started: Started) -> None:
    node = await started(switch_timeout_s=0.3, hung_s=3600)
    left, right = await node.adopt(2, 2)
    tokens = prompt(60)
    expected = first_token(await node.prefill(left, node.item(tokens)))
    os.kill(node.ranks[VICTIM].pid, signal.SIGSTOP)
    with pytest.raises(RolledBack, match=r"epoch 2: ranks \[1\] were not ready within 0.3 s; epoch 1 is served"):
        await node.engine.adopt(2, (4,))
    assert node.engine.health().ok
    assert first_token(await node.prefill(right, node.item(tokens))) == expected, "the others serve at once"
    waiting = asyncio.create_task(node.prefill(left, node.item(tokens)))
    os.kill(node.ranks[VICTIM].pid, signal.SIGCONT)
    assert first_token(await waiting) == expected, "it finds both orders, and goes on where it was"
    for epoch in (2, 3):
        assert await adopted(node, epoch, 4)
        node.epoch = epoch
        assert first_token(await node.prefill(Group(0, 4), node.item(tokens))) == expected


async def adopted(node: TorchNode, epoch: int, *composition: int) -> tuple[RankAdopted, ...]:
    """However late the ranks are on a busy machine."""
    while True:
        try:
            return await node.engine.adopt(epoch, composition)
        except RolledBack:
            await node.answered()


async def test_a_rank_that_stays_silent_is_lost_after_the_way_back(started: Started) -> None:
    node = await started(switch_timeout_s=0.2, hung_s=0.6)
    await adopted(node, 1, 2, 2)
    os.kill(node.ranks[VICTIM].pid, signal.SIGSTOP)
    with pytest.raises(RolledBack):
        await node.engine.adopt(2, (4,))
    assert "rank 1 (pid" in await node.engine.wait_died()
    assert "stopped for 0.6 s" in node.engine.health().detail


async def test_a_switch_nobody_waits_for_goes_to_its_end(started: Started) -> None:
    node = await started()
    await node.adopt(4)
    leaving = asyncio.create_task(node.engine.adopt(2, (2, 2)))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await until(lambda: not node.switch.running, "it has ended")
    node.epoch = 2
    await node.prefill(Group(2, 2), node.item(prompt(60)))


# --- deaths

Kill = Callable[[TorchNode], Awaitable[None]]


async def before_prepare(node: TorchNode) -> None:
    os.kill(node.ranks[VICTIM].pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="rank 1"):
        await node.engine.adopt(2, (2, 2))


async def in_prepare(node: TorchNode) -> None:
    os.kill(node.ranks[VICTIM].pid, signal.SIGSTOP)
    switching = asyncio.create_task(node.engine.adopt(2, (2, 2)))
    await asyncio.sleep(0)
    await node.answered(VICTIM)
    os.kill(node.ranks[VICTIM].pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="rank 1"):
        await switching


async def between_prepare_and_commit(node: TorchNode) -> None:
    def kill() -> None:
        os.kill(node.ranks[VICTIM].pid, signal.SIGKILL)

    at_commit(node, kill)
    with pytest.raises(EngineDied, match="rank 1"):
        await node.engine.adopt(2, (2, 2))


async def in_commit(node: TorchNode) -> None:
    reached = asyncio.Event()

    def stop() -> None:
        os.kill(node.ranks[VICTIM].pid, signal.SIGSTOP)
        reached.set()

    at_commit(node, stop)
    switching = asyncio.create_task(node.engine.adopt(2, (2, 2)))
    await reached.wait()
    await asyncio.sleep(0)
    await node.answered(VICTIM)
    assert not switching.done(), "the others have committed; there is no way back"
    os.kill(node.ranks[VICTIM].pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="rank 1"):
        await switching


async def refused_in_commit(node: TorchNode) -> None:
    """Cannot be, as far as the ranks' code goes; if it is, the ranks no longer agree."""
    rank = node.ranks[VICTIM]
    at_commit(node, lambda: rank.ask(Abort(node.number())) and None)
    with pytest.raises(EngineDied, match="rank 1: epoch 2 was not prepared"):
        await node.engine.adopt(2, (2, 2))


def at_commit(node: TorchNode, act: Callable[[], None]) -> None:
    """`act` when every rank is ready and none has been told to commit."""
    commit = node.switch._commit

    async def acting(epoch: int) -> tuple[RankAdopted, ...]:
        act()
        return await commit(epoch)

    node.switch._commit = acting  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "death", [before_prepare, in_prepare, between_prepare_and_commit, in_commit, refused_in_commit]
)
async def test_a_rank_lost_at_any_point_ends_the_engine(started: Started, death: Kill) -> None:
    node = await started(hung_s=3600, switch_timeout_s=60)
    (group,) = await node.adopt(4)
    await node.prefill(group, node.item(prompt(60)))
    await death(node)
    assert "rank 1" in await node.engine.wait_died()
    with pytest.raises(EngineDied):
        await node.prefill(group, node.item(prompt(60)))
    await node.engine.close()
    again = await started()
    await adopted(again, 2, 2, 2)
    again.epoch = 2
    await again.prefill(Group(2, 2), again.item(prompt(60)))
