"""Steps, copies, leases, switches, evictions and cancellations together: on the modelled engine, turn by turn of the event
loop, and on real ranks with a tiny model."""

import asyncio
import heapq
import random
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.runtime.memory import ManualClock
from tests.services.worker.engine.driven import COMPOSITIONS, Driven
from tests.services.worker.engine.test_modelled import FAST

SMALL = replace(FAST, block_tokens=4, blocks_per_rank=6, link_bytes_per_s=4e6)
"""A block comes in 1 ms and a step takes 2."""

TEXTS = st.text(alphabet="ab", min_size=1, max_size=6)
WORKERS = st.integers(0, 3)
NUMBERS = st.integers(0, 100)


class BareClock(ManualClock):
    """Whose sleepers wake, and go on only as the loop goes round."""

    def wake(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)
        while self._sleepers and self._sleepers[0][0] <= self._now_ns:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)


class DrivenByHand(Driven):
    """In modelled time."""

    def __init__(self, engine: ModelledEngine, clock: BareClock) -> None:
        super().__init__(engine)
        self._clock = clock

    async def pass_time(self) -> None:
        await self._clock.advance(0.01)


class EverythingAtOnce(RuleBasedStateMachine):
    """The rules only begin things. `go_round` lets the loop go round a few times, so that an action meets what another has just
    done and not told yet; `wait` lets time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.errors: list[BaseException] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context["exception"]))
        self.clock = BareClock()
        engine = ModelledEngine(SMALL, self.clock, random.Random(1))
        self.run(engine.start())
        self.driven = DrivenByHand(engine, self.clock)

    def run(self, work: Awaitable[None]) -> None:
        self.loop.run_until_complete(asyncio.ensure_future(work, loop=self.loop))

    def begin(self, action: str, *args: object, **named: object) -> None:
        """In a single turn."""
        self.loop.call_soon(lambda: getattr(self.driven, action)(*args, **named))
        self.turns(1)

    @initialize(composition=st.sampled_from(COMPOSITIONS))
    def start(self, composition: tuple[int, ...]) -> None:
        self.run(self.driven.adopt(composition))

    @rule(worker=WORKERS, texts=st.lists(TEXTS, min_size=1, max_size=3), until=st.none() | st.integers(1, 3))
    def step(self, worker: int, texts: list[str], until: int | None) -> None:
        self.begin("step", worker, texts, until)

    @rule(number=NUMBERS)
    def resume(self, number: int) -> None:
        self.begin("resume", number)

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        self.begin("cancel", number)

    @rule(number=NUMBERS)
    def release(self, number: int) -> None:
        self.begin("release", number)

    @rule(worker=WORKERS, text=TEXTS, own=st.booleans())
    def copy(self, worker: int, text: str, own: bool) -> None:
        self.begin("copy", worker, text, own=own)

    @rule(text=TEXTS)
    def lend(self, text: str) -> None:
        self.begin("lend", text)

    @rule(number=NUMBERS)
    def unpin(self, number: int) -> None:
        self.begin("unpin", number)

    @rule(worker=WORKERS, text=TEXTS, below=st.integers(0, 4))
    def evict(self, worker: int, text: str, below: int) -> None:
        self.run(self.driven.evict(worker, text, below))

    @rule(composition=st.sampled_from(COMPOSITIONS))
    def adopt(self, composition: tuple[int, ...]) -> None:
        self.run(self.driven.adopt(composition))

    @rule(turns=st.integers(1, 4))
    def go_round(self, turns: int) -> None:
        self.turns(turns)

    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    @rule(milliseconds=st.integers(1, 4))
    def wait(self, milliseconds: int) -> None:
        self.clock.wake(milliseconds / 1_000)

    @invariant()
    def agrees(self) -> None:
        assert not self.errors, self.errors
        self.driven.check()

    def teardown(self) -> None:
        self.run(self.driven.settle())
        assert not self.errors, self.errors
        self.loop.close()


TestEverythingAtOnce = EverythingAtOnce.TestCase
TestEverythingAtOnce.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)


ACTIONS_MIN, ACTIONS_MAX = 250, 5_000


async def test_the_same_on_real_ranks(tiny_llama: Path, zygote: Zygote) -> None:
    """A walk by chance, at least 250 actions and then until it has met everything: what a cancellation meets depends on how
    quick the ranks are. A prompt's first token is the same whatever was done to its blocks."""
    chance = random.Random(3)
    wanted = {"finished", "unfinished", "cancelled", "OutOfBlocks", "copy None"}
    slow = TorchSettings(
        tiny_llama,
        prefill_ranks=4,
        block_tokens=4,
        blocks_per_rank=6,
        copy_bytes_per_s=1e6,
        switch_timeout_s=30,  # however busy the machine is
        hung_s=60,
    )
    engine = TorchEngine(slow, zygote)
    await engine.start()
    driven = Driven(engine)
    try:
        await driven.adopt((2, 2))
        for number in range(ACTIONS_MAX):
            await act(driven, chance)
            driven.check()
            if number >= ACTIONS_MIN and wanted <= driven.outcomes:
                break
        await driven.settle()
    finally:
        await engine.close()
    assert {len(tokens) for tokens in driven.first_tokens.values()} == {1}
    assert wanted <= driven.outcomes, f"the walk has met only {driven.outcomes}"


async def act(driven: Driven, chance: random.Random) -> None:
    def text() -> str:
        return "".join(chance.choices("ab", k=chance.randint(1, 6)))

    worker, number = chance.randrange(4), chance.randrange(100)
    match chance.choice(
        ["step"] * 5 + ["copy"] * 4 + ["resume", "cancel", "release", "lend", "unpin", "evict", "adopt", "wait"]
    ):
        case "step":
            texts = [text() for _ in range(chance.randint(1, 3))]
            driven.step(worker, texts, chance.choice([None, None, 1, 2]))
        case "copy":
            driven.copy(worker, text(), own=True)
        case "lend":
            driven.lend(text())
        case "evict":
            await driven.evict(worker, text(), chance.randrange(4))
        case "adopt" if chance.random() < 0.5:
            await driven.adopt(chance.choice(COMPOSITIONS))
        case "resume" | "cancel" | "release" | "unpin" as action:
            getattr(driven, action)(number)
        case _:
            await driven.one_ends()
    await asyncio.sleep(0)
