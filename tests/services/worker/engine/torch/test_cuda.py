"""The first things to run where there is a GPU. One is enough: ranks share it. Skipped without."""

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.protocol import Engine, PrefillItem, PrefillStep, Sampling
from services.worker.engine.torch.devices import visible_gpus
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import RequestId
from shared.model.lattice import Group
from tests.services.worker.engine.contract import EngineContract
from tests.services.worker.engine.copy_contract import CopyContract

GPUS = visible_gpus()
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU")


class TestTorchEngineOnGpus(EngineContract, CopyContract):
    @pytest.fixture
    def new_engine(self, tiny_llama: Path, zygote: Zygote) -> Callable[[], Engine]:
        settings = TorchSettings(tiny_llama, prefill_ranks=4, block_tokens=8, blocks_per_rank=12, gpus=GPUS)
        return lambda: TorchEngine(settings, zygote)


async def answers(model_dir: Path, zygote: Zygote, gpus: int) -> list[list[int]]:
    """Greedy tokens of one prompt computed at each degree, decoded to the tenth."""
    engine = TorchEngine(
        TorchSettings(model_dir, prefill_ranks=4, block_tokens=8, blocks_per_rank=32, gpus=gpus), zygote
    )
    found = []
    await engine.start()
    try:
        for epoch, composition in enumerate([(1, 1, 1, 1), (2, 2), (4,)], start=1):
            await engine.adopt(epoch, composition)
            tokens = np.random.default_rng(1).integers(0, 256, 150).astype(np.uint32)
            item = PrefillItem(RequestId(f"r{epoch}"), tokens, ())
            step = await engine.prefill(PrefillStep(epoch, Group(0, composition[0]), (item,)))
            first = step.items[0].first_token
            assert first is not None, "the step ends its prompt"
            await engine.hand_off(item.request)
            async with aclosing(engine.decode(item.request, first.token, 9, frozenset(), Sampling())) as stream:
                found.append([first.token, *[token.token async for token in stream]])
            engine.release(item.request)
    finally:
        await engine.close()
    return found


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3", "tiny_qwen3_moe"])
async def test_a_gpu_says_what_the_cpu_says(family: str, request: pytest.FixtureRequest, zygote: Zygote) -> None:
    model_dir: Path = request.getfixturevalue(family)
    assert await answers(model_dir, zygote, GPUS) == await answers(model_dir, zygote, 0)
