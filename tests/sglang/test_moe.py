"""Qwen3-MoE with all experts on every unit."""

from collections.abc import Iterator
from itertools import count

import pytest

from services.worker.engine.sglang.verbs import Verbs
from shared.model.lattice import Composition
from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.chain import NEW_TOKENS, check_everywhere, expected, travel
from tests.sglang.conftest import HEADS
from tests.sglang.traffic import mixed_prompts, random_prompt
from tests.support.adapter_servers import Running, launched, wait_up
from tests.support.switching_servers import client, generate
from tests.support.tiny_models import write_tiny_model

pytestmark = ON_REAL_SERVERS

STOPS: list[Composition] = [(2, 2), (2, 1, 1), (4,), (1, 1, 2), (1, 1, 1, 1), (4,)]
EPOCHS = count(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    model = write_tiny_model(
        tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", context=4096, mlp_only_layers=[], **HEADS
    )
    directory = tmp_path_factory.mktemp("moe")
    with launched(model, directory / "fixed") as fixed, launched(model, directory / "switching", units=4) as switching:
        wait_up(fixed, switching)
        yield fixed, switching


async def test_a_chain_with_experts(servers: tuple[Running, Running]) -> None:
    fixed, switching = servers
    async with (
        client(fixed.url) as reference,
        client(switching.url) as http,
    ):
        prompts = mixed_prompts(8 * len(STOPS), seed=3)
        answers = await expected(reference, prompts)
        await travel(http, Verbs(http, 4), EPOCHS, STOPS, prompts, answers)
        prompt = random_prompt(1200, 4)
        await check_everywhere(http, prompt, (await generate(reference, prompt, NEW_TOKENS))[0], 4)
