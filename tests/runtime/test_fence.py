"""Decisions that only one process may take."""

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest

from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import LeadershipTaken
from shared.runtime.appending import Fenced
from shared.runtime.clock import Clock
from shared.runtime.fence import Fence
from shared.runtime.memory import MemoryLog
from shared.runtime.ports import Entry, EventLog, Unavailable
from shared.runtime.projection import Projection
from tests.runtime.conftest import CLOCK, SUBJECTS, World
from tests.runtime.faults import FaultyLog, HastyClock
from tests.runtime.writing import contents, outbox, registered, sealer, taken

Terms = list[tuple[str, int]]


def fold(state: Terms, stored: Stored) -> None:
    if isinstance(stored.data, LeadershipTaken):
        state.append((stored.data.leader, stored.data.term))


class Decider:
    """Takes the next term, over and over. Its state is every term folded."""

    def __init__(self, log: EventLog, name: str, clock: Clock) -> None:
        self.name = name
        self.projection: Projection[Terms] = Projection(log, [SUBJECTS.control], [], fold)
        self.fence = Fence(self.projection, sealer(name, clock), SUBJECTS.control, clock)
        self.won: Terms = []

    async def decide(self, count: int = 1) -> bool:
        """Whether it won. What it decides follows from what it has folded."""
        term = len(self.projection.state) + 1
        decisions: list[EventData] = [taken(self.name, term + each) for each in range(count)]
        try:
            seq = await self.fence.commit(decisions)
        except Fenced:
            return False
        self.won += [(self.name, term + each) for each in range(count)]
        assert self.projection.seen_seq >= seq, "a commit is folded when it returns"
        return True


async def check(log: EventLog, deciders: list[Decider]) -> None:
    """Every term was taken once, by who won it; each source's numbers have no gap; all agree."""
    events = await contents(log)
    terms = [(event.data.leader, event.data.term) for event in events if isinstance(event.data, LeadershipTaken)]
    assert [term for _, term in terms] == list(range(1, len(terms) + 1)), "two decisions from one state"
    assert sorted(terms) == sorted(won for each in deciders for won in each.won), (
        "a loser left a trace, or a winner none"
    )
    for each in deciders:
        numbers = [event.source_seq for event in events if event.source == each.name]
        assert numbers == list(range(1, len(numbers) + 1)), f"{each.name} has a gap"
        await each.projection.folded((await log.bounds())[1])
        assert each.projection.state == terms


async def test_two_deciders_race_and_each_round_has_one_winner(world: World) -> None:
    deciders = [Decider(world.log, name, CLOCK) for name in ("a", "b")]
    for each in deciders:
        await each.projection.start()
    for _ in range(20):
        seen = max(each.projection.seen_seq for each in deciders)
        for each in deciders:
            await each.projection.folded(seen)
        won = await asyncio.gather(*(each.decide() for each in deciders))
        assert any(won)
        if isinstance(world.log, MemoryLog):
            continue  # the second one folds the first one's decision before it begins
        assert sum(won) == 1
    await check(world.log, deciders)
    for each in deciders:
        await each.projection.stop()


@pytest.mark.parametrize("block", range(10))
async def test_the_race_with_lost_acknowledgements(block: int) -> None:
    """30 seeded cases each. Among them: ours is stored, its acknowledgement lost, and theirs lies behind it."""
    fenced = 0
    for seed in range(30 * block, 30 * block + 30):
        chance = random.Random(seed)
        log, clock = MemoryLog(), HastyClock()
        faulty = [FaultyLog(log, chance) for _ in range(2)]
        deciders = [Decider(each, name, clock) for each, name in zip(faulty, ("a", "b"), strict=True)]
        for each in deciders:
            await each.projection.start()
        for each in faulty:
            each.armed = True

        async def act(decider: Decider, rounds: int, chance: random.Random = chance) -> int:
            lost = 0
            for _ in range(rounds):
                lost += not await decider.decide(chance.randrange(1, 4))
                await asyncio.sleep(0)
            return lost

        async with asyncio.timeout(60):
            fenced += sum(await asyncio.gather(*(act(each, 10) for each in deciders)))
        for each in faulty:
            await each.settle()
        await check(log, deciders)
    assert fenced > 10, "the race this is about must happen"


async def test_a_commit_stored_before_the_other_one_counts_although_its_acknowledgement_is_lost() -> None:
    """a's decision is stored, b folds it and decides; only then does a hear that its append failed."""
    log, clock = MemoryLog(), HastyClock()
    b = Decider(log, "b", clock)
    await b.projection.start()

    class Late(FaultyLog):
        async def append(self, entries: Sequence[Entry], expected: Mapping[str, int]) -> int:
            await self.log.append(entries, expected)
            assert await b.decide()
            raise Unavailable("fault: the acknowledgement was lost")

    a = Decider(Late(log, random.Random(0)), "a", clock)
    await a.projection.start()
    assert await a.decide(2)
    await check(log, [a, b])


async def test_a_process_with_an_outbox_has_no_fence() -> None:
    log, clock = MemoryLog(), HastyClock()
    out = await outbox(log, "router-1", clock)
    out.record([registered(1)])
    fence = Fence(out._projection, sealer("router-1", clock), SUBJECTS.control, clock)
    with pytest.raises(AssertionError, match="an outbox or a fence"):
        await fence.commit([taken("router-1", 1)])
    await out.stop()
