"""A running `vertumnus up` on SGLang servers, and what a client and an operator do with it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats
import openai
from openai.types import Completion

from cli.embedded.data_dir import DataDir, RunningSystem
from cli.events.tailing import tail
from services.ledger import database, queries
from shared.contracts.codec import decode
from shared.contracts.commands import Report, encode_message
from shared.contracts.envelope import Stored
from shared.contracts.ids import NodeId
from shared.contracts.subjects import Subjects
from shared.model import holders as holders_model
from shared.model.holders import Holders
from tests.sglang.adapter_requests import BLOCKS, CONTEXT_TOKENS
from tests.support.adapter_servers import PAGE_TOKENS, Running
from tests.support.up import Up

ROOT = Path(__file__).parents[2]
NODE = "n0"
NEW_TOKENS = 8
POLLS, TRIES = 10, 30
"""The controller allows a switch two seconds, which a machine that is busy with others may need several tries for."""

EVENTS_MAX = 1_000_000

BACK_S = 1_800.0
"""For a server to be started again on such a machine."""


def settings_of(
    prefill: Running, units: int, decode: Sequence[Running] = (), *, adaptive: bool = True
) -> dict[str, str]:
    """The environment of the pool's services."""
    address = {"url": prefill.url, "degree": units} | ({"bootstrap_port": prefill.bootstrap_port} if decode else {})
    named = {
        "SGLANG_SERVERS": json.dumps([address]),
        "SGLANG_DECODE": json.dumps([{"url": each.url} for each in decode]),
        "SGLANG_ADAPTIVE": str(adaptive).lower(),
        "BLOCK_TOKENS": str(PAGE_TOKENS),
        "BLOCKS_PER_RANK": str(BLOCKS),
        "CONTEXT_TOKENS_MAX": str(CONTEXT_TOKENS),
        "HUNG_STEP_S_MIN": "600",
        "NO_WORKER_WAIT_S": "60",
    }
    return {f"VERTUMNUS_{name}": value for name, value in named.items()}


class Pool:
    """`environment` is that of every command."""

    def __init__(self, directory: Path, model: Path, composition: str, environment: dict[str, str]) -> None:
        self._environment = environment | {"PYTHONPATH": str(ROOT), "VERTUMNUS_DATA_DIR": str(directory)}
        self._directory = directory
        options = ("--engine", "sglang", "--model", str(model), "--composition", composition)
        self.up = Up(directory, *options, environment=self._environment)
        self.api_url = self.up.ready()["api_url"]
        self.client = openai.OpenAI(base_url=self.api_url, api_key="none", max_retries=0, timeout=600)
        self.model = self.client.models.list().data[0].id
        self.last_id = ""

    def open(self, prompt: list[int], new_tokens: int = NEW_TOKENS) -> openai.Stream[Completion]:
        """A streamed greedy completion."""
        return self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=new_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )

    def stream(self, prompt: list[int]) -> tuple[list[int], int]:
        """The tokens of such a completion, and how many tokens of the prompt were cached."""
        tokens: list[int] = []
        cached = 0
        for chunk in self.open(prompt):
            self.last_id = chunk.id
            tokens += tokens_of(chunk)
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return tokens, cached

    def answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The tokens after each prompt, one after the other."""
        return [self.stream(prompt)[0] for prompt in prompts]

    def reconfigure(self, composition: str) -> None:
        """Until it is so."""
        for _ in range(TRIES):
            self.run("reconfigure", NODE, composition, fails=None)
            for _ in range(POLLS):
                if self.composition() == composition:
                    return
                time.sleep(1.0)
        raise AssertionError(f"{composition} was not committed in {TRIES} tries")

    def aborts(self) -> list[str]:
        """Why the record says that switches were aborted, oldest first."""
        return [str(each["reason"]) for each in self.events("epoch-aborted")]

    def decode_ranks(self, requests: Sequence[str]) -> list[list[str]]:
        """Where each of these was to be decoded, attempt by attempt."""
        assigned = self.events("request-assigned")
        return [[each["decode_worker"] for each in assigned if each["request"] == request] for request in requests]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The data of all events of a type, oldest first."""
        return [json.loads(raw)["data"] for _, raw in self._log(kind)]

    def holders(self) -> Holders:
        """What everybody believes of the caches: the fold of the whole log."""
        holders = Holders()
        for seq, raw in self._log():
            holders_model.evolve(holders, Stored("log", seq, decode(raw)))
        return holders

    def report(self) -> None:
        """Have the agent say what its workers hold, as the cache manager does of one worker each minute."""
        asyncio.run(_ask_for_report(self._runs().nats_url))

    def node(self) -> dict[str, Any]:
        """What the record says of the node."""
        (node,) = asyncio.run(_state(self._runs().database_url))["nodes"]
        return dict(node)

    def _log(self, *kinds: str) -> list[tuple[int, bytes]]:
        """Sequence and bytes of each event, of some types or of all: `vertumnus events tail` without its start."""
        found: list[tuple[int, bytes]] = []
        url = self._runs().nats_url
        asyncio.run(tail(url, EVENTS_MAX, False, frozenset(kinds), lambda seq, raw: found.append((seq, raw))))
        return found

    def _runs(self) -> RunningSystem:
        system = DataDir(self._directory).running()
        assert system is not None, "`up` runs"
        return system

    def composition(self) -> str:
        return ",".join(map(str, self.node()["composition"]))

    def wait_life(self, incarnation: int) -> None:
        """Until the node lives its life number `incarnation`."""
        deadline = time.monotonic() + BACK_S
        while not ((node := self.node())["alive"] and node["incarnation"] >= incarnation):
            assert time.monotonic() < deadline, node
            time.sleep(1.0)

    def run(self, *words: str, fails: bool | None = False) -> str:
        """See `run`."""
        return run(self._environment, *words, fails=fails)


async def _state(database_url: str) -> dict[str, Any]:
    connection = await database.connect(database_url)
    try:
        return await queries.state(connection)
    finally:
        await connection.close()


async def _ask_for_report(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    try:
        await client.request(Subjects("main").agent(NodeId(NODE)), encode_message(Report()), timeout=60)
    finally:
        await client.close()


def run(environment: dict[str, str], *words: str, fails: bool | None = False) -> str:
    """What a command prints; if it is to fail, also to standard error. Whether it fails may not matter (None)."""
    done = subprocess.run(
        [sys.executable, "-c", "from cli.main import app; app()", *words],
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1_200,
    )
    assert fails is None or fails == bool(done.returncode), f"{words}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr if fails else done.stdout


def tokens_of(chunk: Completion) -> list[int]:
    """Those that this part of a stream adds."""
    return [token for choice in chunk.choices for token in choice.token_ids or []]  # type: ignore[attr-defined]
