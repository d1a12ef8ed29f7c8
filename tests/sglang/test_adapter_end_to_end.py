"""An OpenAI client, router, agent and real SGLang server, with a merge and a split in between, and a record that verifies.

Everything is real: `vertumnus up` with NATS, Postgres and five services, and a server whose two units may be grouped."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.sglang.adapter_requests import BLOCKS, ON_REAL_SERVERS
from tests.support.adapter_servers import PAGE_TOKENS, Running, server
from tests.support.up import Up

pytestmark = ON_REAL_SERVERS

ROOT = Path(__file__).parents[2]
POLLS = 10
TRIES = 10
"""The controller allows a switch two seconds, which a machine that is busy with others may need several tries for."""


@pytest.fixture(scope="module")
def switching_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server(model, tmp_path_factory.mktemp("logs") / "switching.log", units=2) as running:
        yield running


class System:
    """A running `vertumnus up`, and its clients."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        self.up = Up(directory, "--engine", "sglang", "--model", str(model), "--composition", "1,1", python_path=ROOT)
        printed = self.up.ready()
        self.client = openai.OpenAI(base_url=printed["api_url"], api_key="none", max_retries=0, timeout=600)
        self.model = self.client.models.list().data[0].id

    def stream(self, prompt: list[int]) -> tuple[list[int], int]:
        """Greedy tokens of a streamed completion, and how many tokens of the prompt were cached."""
        tokens: list[int] = []
        cached = 0
        chunks = self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        for chunk in chunks:
            for choice in chunk.choices:
                tokens += choice.token_ids or []  # type: ignore[attr-defined]
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return tokens, cached

    def reconfigure(self, composition: str) -> None:
        """Until it is so."""
        for _ in range(TRIES):
            self.run("reconfigure", "n0", composition)
            for _ in range(POLLS):
                if self.composition() == composition:
                    return
                time.sleep(1.0)
        raise AssertionError(f"{composition} was not committed in {TRIES} tries")

    def composition(self) -> str:
        told = json.loads(self.run("status", "--json"))
        (node,) = told["nodes"]
        return ",".join(map(str, node["composition"]))

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from cli.main import app; app()", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "VERTUMNUS_DATA_DIR": str(self._directory)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0 or words[0] == "reconfigure", f"{words}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def system(tmp_path: Path, model: Path, switching_server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    servers = [{"url": switching_server.url, "degree": 2}]
    for name, value in {
        "SGLANG_SERVERS": json.dumps(servers),
        "SGLANG_ADAPTIVE": "true",
        "BLOCK_TOKENS": str(PAGE_TOKENS),
        "BLOCKS_PER_RANK": str(BLOCKS),
        "CONTEXT_TOKENS_MAX": "4096",
        "HUNG_STEP_S_MIN": "600",
    }.items():
        monkeypatch.setenv(f"VERTUMNUS_{name}", value)
    system = System(tmp_path / "data", model)
    yield system
    system.up.end()


def test_answers_stay_the_same_through_a_merge_and_a_split_and_the_record_verifies(system: System) -> None:
    prompts = [[(7 * number + position) % 200 for position in range(40 + 60 * number)] for number in range(6)]
    before = [system.stream(prompt)[0] for prompt in prompts]
    assert all(len(tokens) == 8 for tokens in before)
    system.reconfigure("2")
    merged = [system.stream(prompt) for prompt in prompts]
    assert [tokens for tokens, _ in merged] == before
    system.reconfigure("1,1")
    after = [system.stream(prompt) for prompt in prompts]
    assert [tokens for tokens, _ in after] == before
    assert any(cached for _, cached in after), "a split keeps every prefix"
    system.run("verify")
