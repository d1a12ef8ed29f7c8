"""The API as its clients see it: the router, a controller and a node agent as real processes on a real NATS server."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from router_pool import CONTEXT, MODEL, RouterPool, write_model_dir
from tokenizers import Tokenizer

from cli.embedded.nats import EmbeddedNats
from shared.contracts.events import (
    ENDS,
    BlocksStored,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestReceived,
    RequestsRefused,
)
from tests.support.replica import eventually, witness


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path_factory.mktemp("nats"), sync_always=False) as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(nats: EmbeddedNats, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterPool]:
    """One pool for every test here: none of them breaks anything."""
    pool = RouterPool(nats, tmp_path_factory.mktemp("pool"), model_dir=model_dir)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


@pytest.fixture
def client(pool: RouterPool) -> Iterator[OpenAI]:
    with OpenAI(base_url=pool.api, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(pool: RouterPool) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pool.router.url, timeout=30) as client:
        yield client


def ask(text: str = "What is a prefix?", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


class TestAnswers:
    def test_chat(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(**ask(max_tokens=5, seed=1))
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
        assert len((choice.message.content or "").split()) == 5
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5

    def test_a_stream_is_the_same_answer(self, client: OpenAI) -> None:
        whole = client.chat.completions.create(**ask(max_tokens=20, seed=7))
        chunks = list(
            client.chat.completions.create(
                **ask(max_tokens=20, seed=7), stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20

    def test_each_chunk_may_tell_the_usage_so_far(self, client: OpenAI) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(client.chat.completions.create(**ask(max_tokens=6, seed=7), stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert (counts[0] >= 1, counts[-1]) == (True, 6)

    def test_another_seed_is_another_answer(self, client: OpenAI) -> None:
        answers = {
            client.chat.completions.create(**ask(max_tokens=8, seed=seed)).choices[0].message.content
            for seed in (1, 2, 2)
        }
        assert len(answers) == 2

    def test_completion_of_text_and_of_the_same_ids(self, client: OpenAI, model_dir: Path) -> None:
        ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode("Once upon").ids
        answers = [
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0).choices[0].text
            for prompt in ("Once upon", ids, ["Once upon"], [ids])
        ]
        assert len(set(answers)) == 1
        assert len(answers[0].split()) == 6

    def test_sixteen_tokens_are_the_default_of_a_completion(self, client: OpenAI) -> None:
        answer = client.completions.create(model=MODEL, prompt="Once upon")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16

    def test_a_repeated_long_prompt_is_cached(self, client: OpenAI) -> None:
        prompt = "All work and no play makes Jack a dull boy. " * 40
        cached = []
        for _ in range(2):
            answer = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=1)
            usage = answer.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens)
            assert answer.headers["x-vertumnus-cached-tokens"] == str(cached[-1])
            time.sleep(1)  # the router learns from the log what was stored
        assert cached[0] == 0
        assert cached[1] >= len(prompt) - 2 * 16

    def test_a_stop_string_ends_the_answer_before_it(self, client: OpenAI) -> None:
        whole = client.completions.create(model=MODEL, prompt="Stop here", max_tokens=30, seed=3).choices[0].text
        stop = whole.split(" ")[12][1:] + " " + whole.split(" ")[13]
        cut = client.completions.create(model=MODEL, prompt="Stop here", max_tokens=30, seed=3, stop=stop).choices[0]
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason == "stop"

    def test_logprobs(self, client: OpenAI) -> None:
        chat = client.chat.completions.create(**ask(max_tokens=3, seed=1), logprobs=True, top_logprobs=2)
        assert chat.choices[0].logprobs is not None
        content = chat.choices[0].logprobs.content or []
        assert [len(each.top_logprobs) for each in content] == [2, 2, 2]
        assert "".join(each.token for each in content) == chat.choices[0].message.content
        text = client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=1).choices[0]
        assert text.logprobs is not None
        assert text.logprobs.tokens is not None
        assert "".join(text.logprobs.tokens) == text.text

    def test_ids_in_headers(self, client: OpenAI) -> None:
        answer = client.chat.completions.with_raw_response.create(
            **ask(max_tokens=1), extra_headers={"x-request-id": "mine-1"}
        )
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-vertumnus-worker"].startswith("n0/1/")
        assert len(answer.headers["x-vertumnus-decision"]) == 36
        assert len(client.models.with_raw_response.list().headers["x-request-id"]) == 36

    def test_models(self, client: OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "vertumnus"
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("other")
        assert refused.value.code == "model_not_found"

    async def test_many_at_once(self, pool: RouterPool) -> None:
        async with AsyncOpenAI(base_url=pool.api, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(**ask(f"{n}", max_tokens=10, seed=n)) for n in range(60))
            )
        assert {answer.choices[0].finish_reason for answer in answers} == {"length"}
        assert len({answer.id for answer in answers}) == 60


LONG_TEXT = "a" * (CONTEXT + 1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "status", "code", "param"),
        [
            ("chat/completions", b"{", 400, "invalid_json", None),
            ("chat/completions", b"", 400, "invalid_json", None),
            ("chat/completions", b"[]", 400, "invalid_value", None),
            ("chat/completions", b'{"model": "\xff\xfe"}', 400, "invalid_json", None),
            ("chat/completions", b"[" * 100_000, 400, "invalid_json", None),
            ("chat/completions", {}, 400, "missing_required_parameter", "model"),
            ("chat/completions", ask(model="gpt-4"), 404, "model_not_found", "model"),
            ("chat/completions", ask(model=7), 400, "invalid_value", "model"),
            ("chat/completions", ask(n=2), 400, "invalid_value", "n"),
            ("chat/completions", ask(frobnicate=1), 400, "unsupported_parameter", "frobnicate"),
            ("chat/completions", ask(tools=[{"type": "search"}]), 400, "invalid_value", "tools[0].type"),
            ("chat/completions", ask(temperature="hot"), 400, "invalid_value", "temperature"),
            ("chat/completions", ask(temperature=2.1), 400, "invalid_value", "temperature"),
            ("chat/completions", ask(top_p=0), 400, "invalid_value", "top_p"),
            ("chat/completions", ask(max_tokens=0), 400, "invalid_value", "max_tokens"),
            ("chat/completions", ask(max_tokens=10**9), 400, "invalid_value", "max_tokens"),
            ("chat/completions", ask(seed=2**70), 400, "invalid_value", "seed"),
            ("chat/completions", ask(stop=["a"] * 5), 400, "invalid_value", "stop"),
            ("chat/completions", ask(stop=""), 400, "invalid_value", "stop[0]"),
            ("chat/completions", ask(top_logprobs=3), 400, "invalid_value", None),
            ("chat/completions", ask(stream_options={"include_usage": True}), 400, "invalid_value", None),
            ("chat/completions", {"model": MODEL, "messages": []}, 400, "invalid_value", "messages"),
            (
                "chat/completions",
                {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 10_000},
                400,
                "invalid_value",
                "messages",
            ),
            (
                "chat/completions",
                {"model": MODEL, "messages": [{"role": "robot", "content": "x"}]},
                400,
                "invalid_value",
                "messages[0].role",
            ),
            (
                "chat/completions",
                {
                    "model": MODEL,
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
                    ],
                },
                400,
                "invalid_value",
                "messages[0].content",
            ),
            ("chat/completions", ask(LONG_TEXT), 400, "context_length_exceeded", "messages"),
            ("chat/completions", ask("a" * 4_000, max_tokens=1_000), 400, "context_length_exceeded", "messages"),
            ("completions", {"model": MODEL, "prompt": LONG_TEXT}, 400, "context_length_exceeded", "prompt"),
            ("completions", {"model": MODEL, "prompt": [1] * 5_000}, 400, "context_length_exceeded", "prompt"),
            ("completions", {"model": MODEL, "prompt": [1, 2_000]}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": [-1]}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": [1.5]}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": [True]}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": ["a", "b"]}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": ""}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": {"a": 1}}, 400, "invalid_value", "prompt"),
            ("completions", {"model": MODEL, "prompt": "x", "echo": True}, 400, "invalid_value", "echo"),
        ],
    )
    def test_bad_bodies(
        self, http: httpx.Client, path: str, body: Any, status: int, code: str, param: str | None
    ) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = http.post(f"/v1/{path}", content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
        assert 0 < len(error["message"]) < 400
        assert "aaaa" not in error["message"]

    def test_the_numbers_are_told(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 5_000})
        assert "5000 tokens" in answer.json()["error"]["message"]
        assert str(CONTEXT - 1) in answer.json()["error"]["message"]

    def test_ten_megabytes(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 10 * 2**20})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    def test_ten_megabytes_unannounced(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", content=(b"x" * 2**20 for _ in range(10)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    def test_large_headers(self, http: httpx.Client) -> None:
        answer = http.get("/v1/models", headers={"x-large": "x" * 40_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")

    @pytest.mark.parametrize("value", ["0", "-1", "soon", "9" * 30, "1.5"])
    def test_bad_slo(self, http: httpx.Client, value: str) -> None:
        answer = http.post("/v1/chat/completions", json=ask(), headers={"x-vertumnus-ttft-slo-ms": value})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")

    def test_unknown_paths_and_methods(self, http: httpx.Client) -> None:
        assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
        wrong = http.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"

    def test_the_api_is_documented(self, http: httpx.Client) -> None:
        schema = http.get("/openapi.json").json()
        body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
        assert "messages" in body["schema"]["properties"]


class TestPlacements:
    async def test_another_gateway_asks_where_and_says_how_it_went(self, nats: EmbeddedNats, pool: RouterPool) -> None:
        ids = [7, 5, 3] * 20
        raw = np.asarray(ids, dtype="<u4").tobytes()
        async with witness(nats) as seen, httpx.AsyncClient(base_url=pool.api) as http:
            answer = await http.post("/completions", json={"model": MODEL, "prompt": ids, "max_tokens": 1})
            request = answer.json()["id"].removeprefix("cmpl-")

            def stored_seq() -> int:
                found = (each for each in seen.events if isinstance(each.data, BlocksStored))
                return next((each.stream_seq for each in found if each.data.request == request), 0)

            await eventually(stored_seq)
            await eventually(lambda: seen_seq(pool) >= stored_seq())
            answer = await http.post("/placements", content=raw, headers={"content-type": "application/octet-stream"})
            told = answer.raise_for_status().json()
            assert (told["cached_tokens"], told["uncached_tokens"]) == (48, 12)
            assert told["candidates"][0]["trust"] == "exact"
            (await http.post(f"/placements/{told['id']}/started")).raise_for_status()
            (await http.post(f"/placements/{told['id']}/completed", json={"ttft_ms": 3})).raise_for_status()
            await eventually(lambda: told["id"] in {each.request for each in seen.all(RequestCompleted)})
            await eventually(lambda: open_requests(seen) == 0)


class TestRecord:
    async def test_a_client_that_leaves_cancels(self, nats: EmbeddedNats, pool: RouterPool) -> None:
        async with witness(nats) as seen, AsyncOpenAI(base_url=pool.api, api_key="none", max_retries=0) as client:
            for _ in range(20):  # an answer takes a second: on a busy machine it may be over before its reader has gone
                stream = await client.chat.completions.create(**ask("leave", max_tokens=3_000), stream=True)
                async for _ in stream:
                    break
                await stream.response.aclose()
                await eventually(lambda: open_requests(seen) == 0)
                if seen.all(RequestCancelled):
                    break
            assert seen.all(RequestCancelled)
            await eventually(lambda: "vertumnus_router_open_requests 0.0" in metrics(pool))

    async def test_a_client_that_leaves_before_the_first_token_cancels(
        self, nats: EmbeddedNats, pool: RouterPool
    ) -> None:
        async with witness(nats) as seen:
            before = len(seen.all(RequestCancelled))
            body = json.dumps({"model": MODEL, "prompt": [5] * 4_000, "max_tokens": 1}).encode()
            raw = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            for _ in range(20):  # a prefill takes milliseconds: some of twenty hang up before its end
                with socket.create_connection(("127.0.0.1", pool.router.port)) as connection:
                    connection.sendall(raw)
                    await asyncio.sleep(0.005)
            await eventually(lambda: len(seen.all(RequestCancelled)) > before)
            await eventually(lambda: open_requests(seen) == 0)

    async def test_every_request_ends_once(self, nats: EmbeddedNats, pool: RouterPool) -> None:
        async with witness(nats) as seen:
            await eventually(lambda: open_requests(seen) == 0)
            ended = [each.data.request for each in seen.events if isinstance(each.data, ENDS)]
            assert len(ended) == len(set(ended)) > 0
            assigned = seen.all(RequestAssigned)
            assert {each.request for each in assigned} <= set(ended)

    async def test_refusals_are_counted_not_listed(self, nats: EmbeddedNats, pool: RouterPool) -> None:
        async with witness(nats) as seen, httpx.AsyncClient(base_url=pool.api) as http:
            before = len(seen.events)
            for _ in range(50):
                await http.post("/completions", content=b"{")
            # Those of the tests before may still be on their way.
            await eventually(lambda: sum(each.count for each in refusals(seen, before)) >= 50)
            assert len(refusals(seen, before)) < 50

    async def test_no_text_and_no_token_is_in_the_log(self, nats: EmbeddedNats, client: OpenAI) -> None:
        client.chat.completions.create(**ask("xyzzy-plugh", max_tokens=3))
        async with witness(nats) as seen:
            assert not any("xyzzy" in each.event.model_dump_json() for each in seen.events)


def open_requests(seen: Any) -> int:
    ended = {each.data.request for each in seen.events if isinstance(each.data, ENDS)}
    return len({each.request for each in seen.all(RequestReceived)} - ended)


def refusals(seen: Any, since: int) -> list[RequestsRefused]:
    return [each.data for each in seen.events[since:] if isinstance(each.data, RequestsRefused)]


def seen_seq(pool: RouterPool) -> float:
    """How far the router has folded the log."""
    return float(re.findall(r"^vertumnus_seen_seq (\S+)$", metrics(pool), re.MULTILINE)[0])


def metrics(pool: RouterPool) -> str:
    return httpx.get(f"{pool.router.url}/metrics").text
