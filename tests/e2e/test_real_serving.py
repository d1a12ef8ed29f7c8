"""The whole system on the torch engine with a tiny model: the answers are transformers', and no death loses a request.

Everything is real: `vertumnus up` with NATS, Postgres, five services and nine rank processes, spoken to by the `openai` client.
"""

import asyncio
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.embedded.data_dir import DataDir
from services.ledger.audit import Audit, audit
from services.worker.engine.torch.recheck import recheck
from shared.model.parameters import RECOMMENDED
from tests.support.tiny_models import write_tiny_model
from tests.support.up import Up

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
    pytest.mark.timeout(420),
]

SLACK_S = 10.0
"""A call returns within twice its predicted TTFT and this, whatever dies (its answer's few tokens take no time)."""
CLIENTS = 4

POLICIES = {**RECOMMENDED, "reconfiguration_policy": "off", "refit": False}
"""As every new pool's, but for compositions: those are the tests' own. A fit to this machine, where more ranks are no faster,
would leave workers of higher degrees without requests."""


class Call(NamedTuple):
    """One call as its client saw it: `error` is the class of the exception, empty for an answer."""

    seconds: float
    error: str


class System:
    def __init__(self, directory: Path, model_dir: Path) -> None:
        self.home = DataDir(directory / "data")
        self.model_dir = model_dir
        self.up = Up(self.home.path, "--engine", "torch", "--model", str(model_dir))
        self.printed = self.up.ready()
        self.client = openai.OpenAI(base_url=self.printed["api_url"], api_key="none", max_retries=0, timeout=60)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt: list[int], max_tokens: int = 6) -> tuple[list[int], str, int]:
        """Greedy tokens of a completion, the worker that prefilled it, cached tokens."""
        raw = self.client.completions.with_raw_response.create(
            model=self.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        answer = raw.parse()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        return answer.choices[0].token_ids, raw.headers["x-vertumnus-worker"], cached  # type: ignore[attr-defined]

    def longest_prediction_s(self) -> float:
        """The highest predicted TTFT, queue included, of any assignment on record."""
        return max(each["queue_us"] + each["service_us"] for each in self.recorded("request-assigned")) / 1e6

    def recorded(self, kind: str) -> list[dict[str, Any]]:
        """The data of every event of a type on record; waits for a ledger that has died."""
        headers = {"authorization": f"Bearer {(self.home.path / 'operator.key').read_text().strip()}"}
        transport = httpx.HTTPTransport(retries=8)
        with httpx.Client(base_url=self.printed["console_url"], headers=headers, transport=transport) as record:
            found: list[dict[str, Any]] = []
            after = "0"
            while True:
                query: dict[str, str | int] = {"type": kind, "after": after, "limit": 500}
                page = record.get("/v1/events", params=query).raise_for_status().json()
                if not page["events"]:
                    return found
                found += (each["data"] for each in page["events"])
                after = page["next"]

    def set(self, **changes: object) -> None:
        """Change parameters of the pool, as an operator."""
        self.operate("parameters", changes=changes)

    def switch(self, *composition: int) -> int:
        """Have the node serve another composition; its epoch."""
        epochs = len(self.recorded("epoch-committed"))
        self.operate("reconfigure", node="n0", composition=composition)
        return int(self.until_recorded("epoch-committed", epochs + 1)[-1]["epoch"])

    def operate(self, command: str, **asked: object) -> None:
        running = self.home.running()
        assert running is not None
        key = running.operator_key_file.read_text().strip()
        httpx.post(
            f"{running.services['controller'].url}/v1/operator/{command}",
            headers={"authorization": f"Bearer {key}"},
            json={"asked_by": "test", "reason": "", **asked},
            timeout=10,
        ).raise_for_status()

    def until_recorded(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """The events of a type, once there are so many."""
        deadline = time.monotonic() + 90
        while len(found := self.recorded(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} {kind} in 90 s"
            time.sleep(0.2)
        return found

    def settled(self) -> Audit:
        """The audit of the record once nothing is open."""
        running = self.home.running()
        assert running is not None
        deadline = time.monotonic() + 60
        while True:
            found = asyncio.run(audit(running.database_url))
            if not found.open_requests or time.monotonic() > deadline:
                return asyncio.run(audit(running.database_url, settled=True))
            time.sleep(0.5)


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    directory = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    directory.chmod(0o711)
    settings = {
        "VERTUMNUS_BLOCK_TOKENS": "16",
        "VERTUMNUS_FIRST_TOKEN_SLACK_S": str(SLACK_S),
        # `up` lets a request wait for longer than that while no worker is there.
        "VERTUMNUS_NO_WORKER_WAIT_S": "5",
        # Small enough that the prompts below are packed together and taken in chunks.
        "VERTUMNUS_STEP_TOKENS_MAX": "256",
        "VERTUMNUS_CHUNK_TOKENS": "96",
    }
    os.environ.update(settings)
    try:
        running = System(directory, write_tiny_model(directory / "tiny", "qwen3"))
        running.set(**POLICIES)
        yield running
        status, said = running.up.end(signal.SIGTERM)
        assert status == 0, said
    finally:
        for name in settings:
            del os.environ[name]
        shutil.rmtree(directory, ignore_errors=True)


def prompts(count: int, tokens: int) -> list[list[int]]:
    chance = random.Random(count)
    return [[chance.randrange(200) for _ in range(tokens)] for _ in range(count)]


def test_a_split_leaves_prefixes_on_both_sides_and_they_come_with_the_first_prompt_that_wants_them(
    system: System,
) -> None:
    """At λ = 0 the largest worker serves long prompts. After its split their blocks lie on the ranks of both halves. A fetch
    that runs into its limit, as while the node's mover starts, leaves an ordinary miss; one of six does not.

    It comes first: what reads have taken before decides whether these are worth it, and `vertumnus` has requests read."""
    asked = prompts(6, 470)
    system.set(placement_policy="paper", lam=0.0)
    try:
        before = [system.complete(prompt) for prompt in asked]
        epoch = system.switch(1, 1, 2, 2, 2)
        halves = {f"n0/{epoch}/{rank}" for rank in (4, 6)}
        [*_, reconciled] = system.recorded("placement-reconciled")
        assert {each["worker"] for each in reconciled["workers"] if each["pending"]} == halves
        after = [system.complete(prompt) for prompt in asked]
        assert {worker for _, worker, _ in after} <= halves, "a request goes to where its prefix is pending"
        came = [each["worker"] for each in system.recorded("blocks-stored") if each["cause"] == "reconciliation"]
        reused = {worker for _, worker, cached in after if cached == 464}
        assert reused
        assert reused <= set(came)
        epoch = system.switch(1, 1, 2, 4)
        merged = [system.complete(prompt) for prompt in asked]
        assert {worker for _, worker, _ in merged} == {f"n0/{epoch}/4"}
        assert [cached for _, _, cached in merged] == [464] * len(asked)
        assert [tokens for tokens, _, _ in (*after, *merged)] == [tokens for tokens, _, _ in before] * 2
        model = AutoModelForCausalLM.from_pretrained(system.model_dir, dtype=torch.float32, local_files_only=True)
        answers = [{"prompt": prompt, "output": tokens} for prompt, (tokens, _, _) in zip(asked, after, strict=True)]
        assert recheck(model, answers).mismatches == 0
    finally:
        system.set(lam=0.1, **POLICIES)


def test_answers_are_what_transformers_says_at_every_degree_and_with_cached_prefixes(system: System) -> None:
    asked = [*prompts(8, 45), *prompts(9, 150), *prompts(10, 330)]
    asked += [prompt[:-7] + tail for prompt in asked for tail in ([3, 1, 4], [1, 5, 9, 2, 6])]
    answers: list[dict[str, list[int]]] = []
    workers: dict[str, int] = {}
    lock = threading.Lock()

    def ask(prompt: list[int]) -> None:
        tokens, worker, cached = system.complete(prompt)
        with lock:
            answers.append({"prompt": prompt, "output": tokens})
            workers[worker] = workers.get(worker, 0) + (cached > 0)

    parallel(ask, asked[:27])
    parallel(ask, asked[27:])
    assert {int(worker.rsplit("/", 1)[1]) for worker in workers} >= {0, 2, 4}, "CP1, CP2 and CP4 all served"
    assert sum(workers.values()) > 10, f"prefixes were reused: {workers}"
    model = AutoModelForCausalLM.from_pretrained(system.model_dir, dtype=torch.float32, local_files_only=True)
    verdict = recheck(model, answers)
    assert verdict.mismatches == 0, verdict
    assert verdict.answers == len(asked)
    assert any(each["steps"] > 1 for each in system.recorded("prefill-completed")), "long prompts went in chunks"


def test_chat_streams_with_usage(system: System) -> None:
    stream = system.client.chat.completions.create(
        model=system.model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"


def test_a_hot_prefix_gets_a_second_copy_that_goes_when_it_is_cold(system: System) -> None:
    """λ is set so high that the small workers serve; the prefix of one of them is copied to the other, rank to rank."""
    [prompt] = prompts(1, 60)
    system.set(placement_policy="paper", lam=10.0, cache_policy="paper", scan_every_s=1.0, theta_reclaim=0.5)
    try:
        answers = [system.complete(prompt)[0] for _ in range(6)]
        [installed, *_] = system.until_recorded("replica-installed")
        asked = {each["operation"]: each for each in system.recorded("replication-requested")}[installed["operation"]]
        assert (asked["kind"], asked["degree"], asked["blocks"]) == ("intra", 1, 3)
        assert asked["destination"] not in asked["sources"]
        answers += [system.complete(prompt)[0] for _ in range(4)]
        assert answers == answers[:1] * 10
        reclaimed = system.until_recorded("replica-reclaimed")
        assert all(each["worker"] for each in reclaimed)
        assert system.complete(prompt)[0] == answers[0]
    finally:
        system.set(lam=0.1, theta_reclaim=0.3, **POLICIES)


@pytest.mark.parametrize("victim", ["rank", "services.worker", "services.router", "services.ledger"])
def test_every_call_returns_while_its_servers_die(system: System, victim: str) -> None:
    with Load(system) as load:
        load.until(lambda: load.answered() >= CLIENTS)
        os.kill(victim_of(system, victim), signal.SIGKILL)
        died = load.answered()
        load.until(lambda: load.answered() >= died + 3 * CLIENTS)
    worst = max(load.calls, key=lambda call: call.seconds)
    assert worst.seconds <= 2 * system.longest_prediction_s() + SLACK_S, worst
    errors = {call.error for call in load.calls if call.error}
    # A client of a router that dies sees its connection end; everybody else gets an answer or a refusal by status.
    allowed = {"InternalServerError", "RateLimitError"} | (
        {"APIConnectionError"} if victim == "services.router" else set()
    )
    assert errors <= allowed, errors


def test_the_record_is_whole_after_all_of_it(system: System) -> None:
    found = system.settled()
    assert found.clean, found.violations
    assert found.requests > 50
    assert sum(found.by_end.values()) == found.requests


class Load:
    """A few clients that ask without pause until told to stop."""

    def __init__(self, system: System) -> None:
        self.calls: list[Call] = []
        self._system = system
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answered(self) -> int:
        return sum(not call.error for call in list(self.calls))

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not holds():
            assert time.monotonic() < deadline, f"no recovery in 90 s: {self.calls[-8:]}"
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                self._system.complete([chance.randrange(200) for _ in range(chance.randrange(20, 200))], max_tokens=4)
                error = ""
            except openai.OpenAIError as failed:
                error = type(failed).__name__
                time.sleep(0.1)
            self.calls.append(Call(time.monotonic() - begun, error))


def parallel(ask: Callable[[list[int]], None], asked: list[list[int]]) -> None:
    """Six at a time, so that queues push requests onto every worker."""
    queue = itertools.chain(asked)
    lock = threading.Lock()
    failures: list[Exception] = []

    def work() -> None:
        while True:
            with lock:
                prompt = next(queue, None)
            if prompt is None:
                return
            try:
                ask(prompt)
            except Exception as error:  # noqa: BLE001 - carried to the test's own thread
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def victim_of(system: System, victim: str) -> int:
    if victim != "rank":
        return system.up.child(victim)
    (agent,) = [pid for pid, line in system.up.children().items() if "services.worker" in line]
    return max(leaves(agent))


def leaves(pid: int) -> list[int]:
    """Processes below `pid` that have no children: ranks."""
    lists = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for each in lists for child in each.split()]
    return [leaf for child in children for leaf in leaves(child)] or [pid]
