"""The modelled engine keeps the contract of every engine, and takes the time that the cost model says."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.modelled import NOISE_MIN, ModelledEngine, ModelledNode
from services.worker.engine.protocol import Engine, EngineDied, PrefillItem, PrefillStep, Sampling, StepResult
from shared.contracts.ids import RequestId
from shared.model.blocks import Tokens, block_chain
from shared.model.cost import Coefficients, load_coefficients
from shared.model.lattice import Group
from shared.runtime.clock import SystemClock
from shared.runtime.memory import ManualClock
from tests.services.worker.engine.contract import EngineContract
from tests.services.worker.engine.copy_contract import CopyContract

FAST = ModelledNode(
    model="modelled",
    model_revision="1",
    tokenizer_revision="1",
    vocabulary=50_000,
    prefill_ranks=4,
    decode_ranks=1,
    block_tokens=16,
    blocks_per_rank=32,
    context_tokens_max=100_000,
    kv_bytes_per_token=1_000,
    coefficients=Coefficients(version="fast", d=0.002, a=1e-6, b=0.0, c=0.0, alpha=0.0),
    tpot_s=0.001,
    link_bytes_per_s=1e9,
)

REAL = replace(FAST, coefficients=load_coefficients("qwen3_30b_a3b_h20"), blocks_per_rank=4_096)


class TestModelled(EngineContract, CopyContract):
    @pytest.fixture
    def new_engine(self) -> Callable[[], Engine]:
        return lambda: ModelledEngine(FAST, SystemClock(), random.Random(1))


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 200, length).astype(np.uint32)


def item(name: str, tokens: Tokens) -> PrefillItem:
    return PrefillItem(RequestId(name), tokens, tuple(block_chain(tokens, 16, b"k")), Sampling())


async def at_work(
    node: ModelledNode, composition: tuple[int, ...], chance: int = 1
) -> tuple[ModelledEngine, ManualClock]:
    clock = ManualClock()
    engine = ModelledEngine(node, clock, random.Random(chance))
    await engine.start()
    adopting = asyncio.ensure_future(engine.adopt(1, composition))
    await clock.advance(1.0)
    await adopting
    return engine, clock


async def seconds(engine: ModelledEngine, clock: ManualClock, group: Group, *items: PrefillItem) -> StepResult:
    """The step, in as much time as it wants."""
    running = asyncio.ensure_future(engine.prefill(PrefillStep(1, group, items)))
    await clock.advance(3_600.0)
    for each in items:
        engine.release(each.request)
    engine.check()
    return running.result()


@pytest.mark.parametrize("degree", [1, 2, 4])
async def test_a_step_takes_what_the_cost_model_says(degree: int) -> None:
    engine, clock = await at_work(REAL, (degree,) * (4 // degree))
    tokens = prompt(20_000)
    cold = await seconds(engine, clock, Group(0, degree), item("a", tokens))
    assert cold.seconds == pytest.approx(REAL.coefficients.prefill_us(degree, 20_000, 0) / 1e6, abs=1e-6)
    longer = np.concatenate([tokens, prompt(1_000, seed=1)])
    warm = await seconds(engine, clock, Group(0, degree), item("b", longer))
    assert warm.seconds == pytest.approx(REAL.coefficients.prefill_us(degree, 1_000, 20_000) / 1e6, abs=1e-6)


async def test_packed_requests_share_the_constant_part() -> None:
    engine, clock = await at_work(REAL, (4,))
    prompts = [prompt(3_000, seed) for seed in range(3)]
    packed = await seconds(engine, clock, Group(0, 4), *(item(f"p{n}", each) for n, each in enumerate(prompts)))
    costs = REAL.coefficients
    alone_us = costs.prefill_us(4, 3_000, 0)
    assert packed.seconds == pytest.approx((3 * alone_us - 2 * costs.prefill_us(4, 0, 0)) / 1e6, abs=1e-5)


async def test_speedup_and_straggler_scale_the_time() -> None:
    base_us = REAL.coefficients.prefill_us(4, 5_000, 0)
    for changed, factor in ((replace(REAL, speedup=10.0), 0.1), (replace(REAL, straggler=3.0), 3.0)):
        engine, clock = await at_work(changed, (4,))
        result = await seconds(engine, clock, Group(0, 4), item("a", prompt(5_000)))
        assert result.seconds == pytest.approx(base_us * factor / 1e6, abs=1e-6)


async def test_noise_has_the_asked_deviation_and_repeats_with_its_seed() -> None:
    noisy = replace(REAL, noise_sd=0.05, blocks_per_rank=64)

    async def ratios(chance: int) -> list[float]:
        engine, clock = await at_work(noisy, (4,), chance)
        base_s = REAL.coefficients.prefill_us(4, 500, 0) / 1e6
        steps = [await seconds(engine, clock, Group(0, 4), item(f"r{n}", prompt(500, seed=n))) for n in range(150)]
        return [step.seconds / base_s for step in steps]

    first = await ratios(1)
    assert first == await ratios(1)
    assert first != await ratios(2)
    assert np.mean(first) == pytest.approx(1.0, abs=0.02)
    assert np.std(first) == pytest.approx(0.05, rel=0.25)
    assert min(first) > NOISE_MIN


async def test_hand_off_takes_bytes_by_bandwidth_and_decode_its_tpot() -> None:
    engine, clock = await at_work(replace(FAST, link_bytes_per_s=1e6, tpot_s=0.05), (4,))
    first = item("a", prompt(100))
    prefill = asyncio.ensure_future(engine.prefill(PrefillStep(1, Group(0, 4), (first,))))
    await clock.advance(1.0)
    handing = asyncio.ensure_future(engine.hand_off(first.request))
    await clock.advance(0.099)
    assert not handing.done()
    await clock.advance(0.002)
    assert (handing.result().bytes, handing.result().seconds) == (100_000, 0.1)
    token = prefill.result().items[0].first_token.token
    tokens = engine.decode(first.request, token, 10, frozenset(), Sampling())
    got: list[int] = []

    async def read() -> None:
        got.extend([each.token async for each in tokens])

    reading = asyncio.ensure_future(read())
    await clock.advance(0.499)
    assert not reading.done()
    await clock.advance(0.002)
    assert len(got) == 10


async def test_a_closed_node_breaks_off_the_step_that_runs() -> None:
    engine, clock = await at_work(REAL, (4,))
    running = asyncio.ensure_future(engine.prefill(PrefillStep(1, Group(0, 4), (item("a", prompt(50_000)),))))
    await clock.advance(0.1)
    await engine.close()
    await clock.advance(0.0)
    with pytest.raises(EngineDied):
        running.result()
    engine.check()


async def test_generated_ids_stay_inside_the_vocabulary_and_out_of_the_special_ones() -> None:
    engine, clock = await at_work(replace(REAL, vocabulary=1_200, blocks_per_rank=64), (4,))
    for number in range(50):
        step = await seconds(engine, clock, Group(0, 4), item(f"r{number}", prompt(30, seed=number)))
        assert 1_000 <= step.items[0].first_token.token < 1_200


async def test_any_seed_will_do() -> None:
    engine, clock = await at_work(FAST, (4,))
    for number, seed in enumerate((-1, 0, 2**63, 10**30)):
        asked = replace(item(f"r{number}", prompt(30)), sampling=Sampling(temperature=1.0, seed=seed))
        step = await seconds(engine, clock, Group(0, 4), asked)
        assert 1_000 <= step.items[0].first_token.token < FAST.vocabulary
