"""What hostile clients send, through the HTTP surface of a router in memory: refused by name, and nothing of it is recorded."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import router_app
from router_front import Front
from router_pool import write_model_dir

from services.router import headers
from services.router.prompts import Prompts
from services.router.tokenizer import ModelText
from shared.contracts.events import RequestReceived

COMPLETION = {"model": "toy", "prompt": [11, 12, 13], "max_tokens": 4}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def served(tmp_path: Path, **settings: Any) -> AbstractAsyncContextManager[tuple[Front, httpx.AsyncClient]]:
    return router_app.served(tmp_path, text=ModelText(write_model_dir(tmp_path / "model")), **settings)


def refusal(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert error["message"]
    assert len(answer.content) < 1_000, "what a client sent is not sent back to it"
    return answer.status_code, error["param"], error["code"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [True, "4", 1.5, 4.0, 0, -1, 2**31, 10**4_000, [4]]),
        ("max_completion_tokens", [True, "4", 2**31]),
        ("temperature", [True, "1", float("nan"), float("inf"), -0.1, 2.1]),
        ("top_p", ["1", 0, float("nan"), 1.1]),
        ("top_k", [True, "4", 1.5, -2, 2**31]),
        ("min_p", ["1", -0.1, float("nan"), 1.1]),
        ("seed", [True, "7", 2**63, -(2**63) - 1, 0.5]),
        ("stop", [0, False, {}, {"a": 1}, [1], [None], [""], ["a"] * 5, "s" * 257]),
        ("stream", ["yes", 1, "true"]),
        ("logprobs", [1, "1"]),
        ("n", [True, 2, "1", 0]),
        ("frequency_penalty", [False, "0.1", float("nan"), 2.1, -2.1]),
        ("presence_penalty", [True, float("inf"), 2.1]),
        ("repetition_penalty", [False, float("nan"), 0, 2.1]),
        ("logit_bias", [[], {"x": 1}, {"-1": 1}, {"²": 1}, {"1": 101}, {"1": "1"}, {"1": float("nan")}, {"1": True}]),
        ("logit_bias", [{str(token): 1 for token in range(1_025)}, {str(2**32): 1}, {"9" * 5_000: 1}]),
        ("min_tokens", [True, -1, 1.5, 2**31, 17]),
        ("stop_token_ids", [3, [True], [-1], [2**32], ["3"], [1] * 65]),
        ("include_stop_str_in_output", [1, "true"]),
        ("response_format", [5, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object"}]),
        ("model", [5, None, "", "m" * 257]),
        ("messages", [None, [], {}, "x", ["x"], [{"role": "user"}], [{"role": "user", "content": 5}]]),
        ("user", [5, "u" * 1_025]),
        ("return_token_ids", [1, "true"]),
    ],
)
async def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    tmp_path: Path, field: str, values: list[object]
) -> None:
    async with served(tmp_path) as (router, client):
        for value in values:
            answer = await client.post("/v1/chat/completions", content=json.dumps({**CHAT, field: value}))
            status, param, _ = refusal(answer)
            assert status == 400, f"{field}: {value!r:.60} was taken"
            assert str(param).startswith(field)
        assert not router.told(RequestReceived)


async def test_absent_and_neutral_values_are_taken(tmp_path: Path) -> None:
    neutral = {"stop": None, "n": 1, "logit_bias": {}, "temperature": 1, "stream": None, "user": "u", "tools": []}
    async with served(tmp_path) as (_, client):
        answer = await client.post("/v1/chat/completions", json={**CHAT, **neutral})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "3600001", "x", "²", "1" * 8, "0000000000000001" + "9" * 30, "1" + "0" * 5_000]
)
async def test_a_wait_beyond_the_limit_reaches_no_event(tmp_path: Path, value: str) -> None:
    async with served(tmp_path) as (router, client):
        answer = await client.post(
            "/v1/completions", json=COMPLETION, headers={"x-vertumnus-ttft-slo-ms": value.encode()}
        )
        assert refusal(answer) == (400, None, "invalid_header")
        assert not router.told(RequestReceived)
        longest = {"x-vertumnus-ttft-slo-ms": str(headers.SLO_MS_MAX)}
        assert (await client.post("/v1/completions", json=COMPLETION, headers=longest)).status_code == 200


async def test_text_that_cannot_fit_is_too_long(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        answer = await client.post("/v1/completions", json={**COMPLETION, "prompt": " " * 4_000_000})
        assert refusal(answer) == (400, "prompt", "context_length_exceeded")
        assert "characters" in answer.text


async def test_a_slow_sender_holds_no_place(tmp_path: Path) -> None:
    sent = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b" "
        await sent.wait()
        yield json.dumps(COMPLETION).encode()

    async with served(tmp_path, open_requests_max=1) as (router, client):
        slow = asyncio.ensure_future(client.post("/v1/completions", content=slowly()))
        await asyncio.sleep(0.05)
        assert router.dispatcher.open_requests == 0
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        sent.set()
        assert (await slow).status_code == 200


async def test_a_text_counts_until_it_is_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.bodies.TOGETHER_BODIES", 1)
    order, reached, go_on = Prompts.order, asyncio.Event(), asyncio.Event()

    async def slow_order(self: Prompts, *given: Any) -> Any:
        reached.set()
        await go_on.wait()
        return await order(self, *given)

    async with served(tmp_path, body_bytes_max=1_024) as (_, client):
        monkeypatch.setattr(Prompts, "order", slow_order)
        body = json.dumps({**COMPLETION, "prompt": "x" * 900})
        first = asyncio.ensure_future(client.post("/v1/completions", content=body))
        await reached.wait()
        assert refusal(await client.post("/v1/completions", content=body))[0] == 429
        go_on.set()
        assert (await first).status_code == 200
