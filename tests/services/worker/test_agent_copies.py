"""Copies, leases and evictions at an agent, over the in-memory log and bus, with the modelled engine.

The other node is a script: it has blocks and answers `pin`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from services.worker.copying import COPIES_MAX, LEASES_MAX
from services.worker.engine import copy_plan
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.modelled_copies import LATENCY_S
from services.worker.engine.protocol import EngineError
from services.worker.transfers import COPY_LEASE_S
from shared.contracts.commands import Accepted, Refused, Reply, decode_command, decode_reply, encode_message
from shared.contracts.copy_commands import Copied, Copy, Evict, Evicted, Pin, Pinned, PinnedSlot, Unpin
from shared.contracts.events import BlocksEvicted, BlocksStored, PrefillAborted, PrefillCompleted
from shared.contracts.ids import BlockId, NodeId, WorkerId, worker_id
from shared.model.blocks import block_chain
from tests.services.worker.scripted import BLOCK_TOKENS, KEY, NODE, SMALL, SUBJECTS, World, prompt, running, worker

OTHER = NodeId("n1")
ACCESS = b"modelled@1/16"
BLOCK_S = BLOCK_TOKENS * SMALL.kv_bytes_per_token / SMALL.link_bytes_per_s
"""16 ms: a copy of ten blocks takes 165 ms."""


def chain(blocks: int, seed: int = 0) -> list[BlockId]:
    return block_chain(prompt(blocks * BLOCK_TOKENS, seed), BLOCK_TOKENS, KEY)


def copy(blocks: list[BlockId], operation: str = "o", at: WorkerId | None = None, **changes: object) -> Copy:
    order = Copy(
        term=1,
        operation=operation,
        source=worker_id(OTHER, 1, 0),
        destination=at or worker(2),
        block_ids=b"".join(blocks),
        deadline_us=10_000_000,
    )
    return order.model_copy(update=changes)


@dataclass
class OtherNode:
    """Has the blocks of `held`, and remembers what it was asked; the answer takes `silent_s`."""

    world: World
    held: set[BlockId]
    silent_s: float = 0.0
    generation: int = 1
    pins: list[Pin] = field(default_factory=list)
    unpins: list[Unpin] = field(default_factory=list)

    async def listen(self) -> None:
        await self.world.bus.subscribe(SUBJECTS.agent(OTHER), self._handle)

    async def _handle(self, _subject: str, payload: bytes) -> bytes:
        command = decode_command(payload)
        if isinstance(command, Unpin):
            self.unpins.append(command)
            return encode_message(Accepted())
        assert isinstance(command, Pin)
        self.pins.append(command)
        if self.silent_s:
            await self.world.clock.sleep(self.silent_s)
        asked = [command.block_ids[start : start + 16] for start in range(0, len(command.block_ids), 16)]
        slot = PinnedSlot(rank=0, index=1, generation=self.generation)
        slots = tuple(slot if block in self.held else None for block in asked)
        return encode_message(Pinned(slots=slots, access=ACCESS))


async def other(world: World, held: list[BlockId]) -> OtherNode:
    node = OtherNode(world, set(held))
    await node.listen()
    return node


def stored_by_copies(world: World) -> list[BlocksStored]:
    return [each for each in world.events(BlocksStored) if isinstance(each, BlocksStored) and each.cause != "prefill"]


@pytest.mark.parametrize("cause", ["replication", "reconciliation", "fetch"])
async def test_a_copy_is_told_with_its_cause_once_it_is_there(cause: str) -> None:
    world, blocks = World(), chain(10)
    async with running(world):
        node = await other(world, blocks)
        reply = await world.ask(copy(blocks, cause=cause), within_s=1.0)
        assert reply == Copied(
            blocks=10, bytes=10 * BLOCK_TOKENS * 1_000, copy_us=round((LATENCY_S + 10 * BLOCK_S) * 1e6)
        )
        (stored,) = stored_by_copies(world)
        assert (stored.worker, stored.cause, stored.number, stored.first_depth) == (worker(2), cause, 1, 0)
        assert (stored.blocks, stored.runs[0].parent) == (10, None)
        assert stored.runs[0].block_ids == b"".join(blocks)
        assert [each.correlation for each in world.envelopes()][-1] == "o"
        assert world.state.held_blocks[worker(2)] == 10
        assert [each.operation for each in node.unpins] == ["o"]


async def test_a_repeated_copy_is_done_once_and_answered_again() -> None:
    world, blocks = World(), chain(4)
    async with running(world):
        node = await other(world, blocks)
        replies = [await world.ask(copy(blocks), within_s=1.0) for _ in range(3)]
        assert replies[0] == replies[1] == replies[2]
        assert len(stored_by_copies(world)) == len(node.pins) == 1


async def test_a_copy_brings_the_leading_blocks_that_somebody_has() -> None:
    """The first source has some, the destination's own node others, and nobody has the seventh."""
    world, blocks = World(), chain(10)
    async with running(world):
        await other(world, [*blocks[:4], *blocks[7:]])
        await world.ask(world.assignment("a", prompt(6 * BLOCK_TOKENS)))
        await world.clock.advance(1.0)
        reply = await world.ask(copy(blocks, more_sources=(worker(0),)), within_s=1.0)
        assert isinstance(reply, Copied)
        assert (reply.blocks, reply.failure) == (6, "no-source")
        nothing = await world.ask(copy(chain(3, seed=9), "p", source=worker(0)), within_s=1.0)
        assert nothing == Copied(blocks=0, bytes=0, copy_us=0, failure="no-source")


async def say_nonsense(_subject: str, _payload: bytes) -> bytes:
    return b"{}"


async def test_a_source_that_does_not_answer_or_gives_another_kv_is_no_source() -> None:
    world, blocks = World(), chain(3)
    async with running(world):
        reply = await world.ask(copy(blocks), within_s=10.0)
        assert isinstance(reply, Copied)
        assert reply.failure == "no-source"
    world = World()
    async with running(world):
        await world.bus.subscribe(SUBJECTS.agent(OTHER), say_nonsense)
        reply = await world.ask(copy(blocks), within_s=10.0)
        assert isinstance(reply, Copied)
        assert reply.failure == "no-source"
    world = World(node=replace(SMALL, model="another"))
    async with running(world):
        await other(world, blocks)
        reply = await world.ask(copy(blocks), within_s=10.0)
        assert isinstance(reply, Copied)
        assert (reply.blocks, reply.failure) == (0, "source-lost")
        assert stored_by_copies(world) == []


async def test_refusals_say_why() -> None:
    world, blocks = World(), chain(200)
    async with running(world):
        lent = await other(world, blocks)
        assert (await world.ask(copy(blocks, at=worker(0, epoch=7)))).reason == "stale-epoch"
        assert (await world.ask(copy(blocks, at=worker_id(OTHER, 1, 0)))).reason == "unknown-worker"
        assert (await world.ask(copy(blocks, block_ids=b"short"))).reason == "bad-command"
        assert (await world.ask(copy([]))).detail == "block_ids: 0 ids; a command has 1 to 4096"
        assert (await world.ask(copy(blocks, parent=b"short"))).reason == "bad-command"
        twice = await world.ask(copy([*blocks[:2], blocks[0]]))
        assert (twice.reason, "a path has each once" in twice.detail) == ("engine", True)
        lent.generation = 0
        empty = await world.ask(copy(blocks[:2]))
        assert (empty.reason, "generation 0" in empty.detail) == ("engine", True)
        lent.generation = 1
        full = await world.ask(copy(blocks), within_s=1.0)
        assert (full.reason, "needs" in full.detail) == ("full", True)
        hanging = await world.ask(copy(blocks[5:7], parent=blocks[4]), within_s=1.0)
        assert (hanging.reason, "does not hold it" in hanging.detail) == ("bad-command", True)
        assert isinstance(await world.ask(copy(blocks[:5]), within_s=1.0), Copied), "a refusal is no answer for ever"
        assert (await world.ask(copy(blocks, "old", term=0))).reason == "stale-term"


async def test_more_copies_than_a_node_takes_are_busy_and_a_late_one_stops_at_its_deadline() -> None:
    world = World()
    async with running(world):
        chains = [chain(2, seed) for seed in range(COPIES_MAX + 1)]
        node = await other(world, [block for each in chains for block in each])
        replies: list[Reply] = await world_asks(world, [copy(each, f"o{n}") for n, each in enumerate(chains)])
        assert [reply.kind for reply in replies] == ["copied"] * COPIES_MAX + ["refused"]
        long = chain(20, seed=77)
        node.held.update(long)
        late = await world.ask(copy(long, "late", deadline_us=100_000), within_s=1.0)
        assert isinstance(late, Copied)
        assert (late.failure, late.blocks) == ("time-limit", 5)


async def world_asks(world: World, commands: list[Copy]) -> list[Reply]:
    asked = [
        asyncio.ensure_future(world.bus.request(SUBJECTS.agent(NODE), encode_message(each), 60.0)) for each in commands
    ]
    await world.clock.advance(2.0)
    return [decode_reply(each.result()) for each in asked]


async def test_a_switch_on_the_way_is_told_as_such_and_stores_nothing() -> None:
    world, blocks = World(), chain(10)
    async with running(world):
        await other(world, blocks)
        asked = asyncio.ensure_future(world.bus.request(SUBJECTS.agent(NODE), encode_message(copy(blocks)), 60.0))
        await world.clock.advance(0.05)
        assert (await world.adopt(2, (2, 2))).kind == "accepted"
        await world.clock.advance(1.0)
        assert b'"stale-epoch"' in asked.result()
        assert stored_by_copies(world) == []


async def test_what_is_lent_is_let_go_when_the_reader_says_so_or_is_never_heard_of_again() -> None:
    world, blocks = World(), chain(4)
    async with running(world):
        await world.ask(world.assignment("a", prompt(4 * BLOCK_TOKENS + 1)))
        await world.clock.advance(1.0)
        pins = [Pin(reader=OTHER, operation=name, block_ids=b"".join(blocks)) for name in ("dies", "says so")]
        for pin in pins:
            reply = await world.ask(pin)
            assert isinstance(reply, Pinned)
            assert [slot is not None for slot in reply.slots] == [True] * 4
            assert reply.access == ACCESS
            assert await world.ask(pin) == reply
        evict = Evict(term=1, operation="e1", worker=worker(0), block_ids=b"".join(blocks))
        assert await world.ask(evict) == Evicted(kept={"pinned": 4})
        for _ in range(2):
            assert (await world.ask(Unpin(reader=OTHER, operation="says so"))).kind == "accepted"
        assert await world.ask(evict.model_copy(update={"operation": "e2"})) == Evicted(kept={"pinned": 4})
        await world.clock.advance(COPY_LEASE_S)
        gone = await world.ask(evict.model_copy(update={"operation": "e3"}))
        assert gone == Evicted(block_ids=b"".join(reversed(blocks)))


async def test_leases_are_bounded() -> None:
    world = World()
    async with running(world):
        block_ids = b"".join(chain(1))
        for number in range(LEASES_MAX):
            assert (await world.ask(Pin(reader=OTHER, operation=f"{number}", block_ids=block_ids))).kind == "pinned"
        assert (await world.ask(Pin(reader=OTHER, operation="more", block_ids=block_ids))).reason == "full"
        assert (await world.ask(Pin(reader=OTHER, operation="bad", block_ids=b"?"))).reason == "bad-command"


async def test_an_eviction_is_told_as_reclaimed_once() -> None:
    world, blocks = World(), chain(4)
    async with running(world):
        await world.ask(world.assignment("a", prompt(4 * BLOCK_TOKENS + 1)))
        await world.clock.advance(1.0)
        evict = Evict(term=1, operation="e", worker=worker(0), block_ids=b"".join(blocks[2:]))
        first = await world.ask(evict)
        assert first == await world.ask(evict) == Evicted(block_ids=b"".join(reversed(blocks[2:])))
        (event,) = world.events(BlocksEvicted)
        assert isinstance(event, BlocksEvicted)
        assert (event.worker, event.cause, event.number) == (worker(0), "reclaim", 2)
        assert world.state.held_blocks[worker(0)] == 2
        held = world.pool()
        assert held.nodes[NODE].alive


async def test_between_two_lives_nothing_is_lent_or_copied() -> None:
    world, blocks = World(), chain(2)
    async with running(world, composition=None):
        assert (await world.ask(copy(blocks))).reason == "unknown-worker"
        assert (await world.ask(Unpin(reader=OTHER, operation="o"))).kind == "accepted"


class CannotLend(ModelledEngine):
    """Its mover does not start."""

    async def pin(self, lease: str, blocks: Sequence[BlockId]) -> copy_plan.Pinned:
        raise EngineError("no mover")


async def test_an_engine_that_cannot_lend_is_told_to_who_asked_and_may_be_asked_again() -> None:
    world, blocks = World(engine_class=CannotLend), chain(2)
    async with running(world):
        for _ in range(2):
            refused = await world.ask(copy(blocks, source=worker(0)))
            assert (refused.reason, refused.detail) == ("engine", "no mover")
        lent = await world.ask(Pin(reader=OTHER, operation="p", block_ids=b"".join(blocks)))
        assert (lent.reason, lent.detail) == ("engine", "no mover")


async def test_a_prompt_goes_before_a_copy_and_waits_for_a_lease() -> None:
    """The worker at rank 0 has 64 slots: the copy wants 40 of them, then a reader is lent 40."""
    world = World()
    async with running(world):
        await other(world, chain(40))
        copying = asyncio.ensure_future(
            world.bus.request(SUBJECTS.agent(NODE), encode_message(copy(chain(40), at=worker(0))), 60.0)
        )
        await world.clock.advance(0.1)
        await world.ask(world.assignment("a", prompt(40 * BLOCK_TOKENS, seed=1)))
        await world.clock.advance(1.0)
        stopped = decode_reply(copying.result())
        assert isinstance(stopped, Copied)
        assert (stopped.blocks, stopped.failure) == (5, "cancelled")
        lent = chain(40, seed=1)
        await world.ask(Pin(reader=OTHER, operation="reads", block_ids=b"".join(lent)))
        await world.ask(world.assignment("b", prompt(40 * BLOCK_TOKENS, seed=2)))
        await world.clock.advance(10.0)
        assert [each.request for each in world.events(PrefillCompleted)] == ["a"]  # type: ignore[attr-defined]
        await world.clock.advance(COPY_LEASE_S)
        assert [each.request for each in world.events(PrefillCompleted)] == ["a", "b"]  # type: ignore[attr-defined]
        assert world.events(PrefillAborted) == []


async def test_a_copy_that_outlives_its_agent_begins_nothing_more() -> None:
    """The group of the agent's tasks takes none any longer, and would refuse the one that lets the other node go."""
    world, blocks = World(), chain(10)
    async with running(world) as agent:
        node = await other(world, blocks)
        assert agent._life is not None
        copying = agent._life[2]
        asking = asyncio.create_task(world.ask(copy(blocks), within_s=0.05))
        await world.clock.advance(0.05)
        asking.cancel()
    await world.clock.advance(1.0)
    assert isinstance(await copying._answers["o"], Refused)
    assert (len(node.pins), node.unpins) == (1, [])
