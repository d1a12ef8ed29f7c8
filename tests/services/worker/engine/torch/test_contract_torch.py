"""The engine contract, kept by real ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.engine.protocol import Engine
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.zygote import Zygote
from tests.services.worker.engine.contract import EngineContract
from tests.services.worker.engine.copy_contract import CopyContract


class TestTorchEngine(EngineContract, CopyContract):
    @pytest.fixture
    def new_engine(self, tiny_llama: Path, zygote: Zygote) -> Callable[[], Engine]:
        settings = TorchSettings(tiny_llama, prefill_ranks=4, block_tokens=8, blocks_per_rank=12)
        return lambda: TorchEngine(settings, zygote)
