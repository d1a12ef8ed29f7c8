"""The HTTP surface over a router in memory: keys, statuses, streams that fail, and what headers become."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from router_app import app_of, served
from router_front import Agent, continuation, front, serve, serve_some
from router_pool import write_model_dir

from services.router import bodies
from services.router.settings import RouterSettings
from services.router.tokenizer import ModelText
from shared.contracts.commands import Assign, SamplingSpec
from shared.contracts.events import (
    CalibrationUpdated,
    ParametersChanged,
    RequestAssigned,
    RequestCompleted,
    RequestReceived,
    RequestsRefused,
)
from tests.support.replica import eventually

PROMPT = [11, 12, 13]
SLOW = {"version": "slow", "d": 1.0, "a": 0.0, "b": 0.0, "c": 0.0, "alpha": 0.0}
BODY = {"model": "toy", "prompt": PROMPT, "max_tokens": 4}


def events_of(stream: httpx.Response) -> list[Any]:
    assert stream.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


class TestKeys:
    @pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic s3cret", "Bearer", "s3cret"])
    async def test_an_unknown_key_is_refused(self, tmp_path: Path, header: str | None) -> None:
        file = tmp_path / "keys"
        file.write_text("s3cret\nother\n")
        async with served(tmp_path, api_key_file=file) as (router, client):
            answer = await client.post(
                "/v1/completions", json=BODY, headers={"authorization": header} if header else {}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert "s3cret" not in answer.text
            assert not router.told(RequestReceived)
            assert (await client.get("/v1/models")).status_code == 401

    @pytest.mark.parametrize("header", ["Bearer s3cret", "bearer other"])
    async def test_a_known_one_is_served(self, tmp_path: Path, header: str) -> None:
        file = tmp_path / "keys"
        file.write_text("s3cret\nother\n")
        async with served(tmp_path, api_key_file=file) as (_, client):
            answer = await client.post("/v1/completions", json=BODY, headers={"authorization": header})
            assert answer.status_code == 200


async def test_sampling_fields_reach_the_agent_as_they_were_asked_for(tmp_path: Path) -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "presence_penalty": 0.5,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"17": -100, "3": 2.5}, "min_tokens": 2,
    }  # fmt: skip
    got: list[SamplingSpec] = []

    async def note(agent: Agent, assign: Assign) -> None:
        got.append(assign.sampling)
        await serve(agent, assign)

    async with served(tmp_path, note) as (_, client):
        for more in ({}, {"top_k": -1, "min_p": 0}):
            assert (await client.post("/v1/completions", json=BODY | asked | more)).status_code == 200
    assert got[0] == SamplingSpec.model_validate(asked)
    assert (got[1].top_k, got[1].min_p) == (0, 0.0)


async def test_stop_tokens_are_those_of_the_client_and_the_models_unless_it_ignores_them(tmp_path: Path) -> None:
    text, got = ModelText(write_model_dir(tmp_path / "model")), list[Assign]()

    async def note(agent: Agent, assign: Assign) -> None:
        got.append(assign)
        await serve(agent, assign)

    async with served(tmp_path, note, text) as (_, client):
        for more, stops in (
            ({"stop_token_ids": [9, 5, 9]}, (*text.stop_tokens, 9, 5)),
            ({"stop_token_ids": [9], "ignore_eos": True}, (9,)),
            ({"ignore_eos": True}, ()),
        ):
            body = BODY | {"prompt": "x"} | more
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert got[-1].stop_tokens == stops


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}}}


async def test_an_answer_is_bound_to_a_schema_where_the_pools_engine_can(tmp_path: Path) -> None:
    got: list[Assign] = []

    async def note(agent: Agent, assign: Assign) -> None:
        got.append(assign)
        await serve(agent, assign)

    async with served(tmp_path, note) as (_, client):
        refused = await client.post("/v1/completions", json=BODY | {"response_format": FORMAT})
        assert refused.json()["error"] == {
            "message": "invalid 'response_format': only type text, because the modelled engine of this pool has no grammars",
            "type": "invalid_request_error",
            "param": "response_format",
            "code": "unsupported_value",
        }
        plain = await client.post("/v1/completions", json=BODY | {"response_format": {"type": "text"}})
        assert (plain.status_code, got[-1].sampling.json_schema) == (200, None)
    async with served(tmp_path, note, engine="sglang") as (router, client):
        for given, schema in ((FORMAT, '{"type": "integer"}'), ({"type": "json_object"}, '{"type": "object"}')):
            answer = await client.post("/v1/completions", json=BODY | {"response_format": given})
            assert (answer.status_code, got[-1].sampling.json_schema) == (200, schema)
        nan = json.dumps(BODY | {"response_format": FORMAT | {"json_schema": {"schema": {"maximum": float("nan")}}}})
        refused = await client.post("/v1/completions", content=nan)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
        await Agent(router, "n1").start((4,), block_tokens=16)
        mixed = await client.post("/v1/completions", json=BODY | {"response_format": FORMAT})
        assert (mixed.status_code, "modelled" in mixed.text) == (400, True)
        both = BODY | {"ignore_eos": True, "stop_token_ids": [3]}
        assert (await client.post("/v1/completions", json=both)).json()["error"]["param"] == "stop_token_ids"


class TestTenants:
    async def test_a_key_names_its_tenant_and_a_gateways_key_any(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("acme s3cret\n* gateway\n")
        async with served(tmp_path, api_key_file=file) as (router, client):
            statuses = []
            for key, named in (
                ("s3cret", None),
                ("s3cret", "acme"),
                ("s3cret", "corp"),
                ("gateway", "corp"),
                ("gateway", None),
            ):
                headers = {"authorization": f"Bearer {key}"} | ({"x-vertumnus-tenant": named} if named else {})
                statuses.append((await client.post("/v1/completions", json=BODY, headers=headers)).status_code)
            assert statuses == [200, 200, 403, 200, 200]
            assert [each.tenant for each in router.told(RequestReceived)] == ["acme", "acme", "corp", "default"]
            chains = {each.tenant: each.block_ids for each in router.told(RequestReceived)}
            assert len(chains) == 3

    async def test_a_limit_is_told_with_a_time(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (router, client):
            changes = {"tenants": {"acme": {"tokens_per_minute": 4}}}
            told = ParametersChanged(parameters_version=1, changes=changes, asked_by="t")
            await router.tell(told, sender="controller", source="controller")
            headers = {"x-vertumnus-tenant": "acme"}
            first, second = [await client.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
            other = await client.post("/v1/completions", json=BODY)
            assert (first.status_code, second.status_code, other.status_code) == (200, 429, 200)
            error = second.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "4 prompt tokens a minute" in error["message"]
            assert 55 <= int(second.headers["retry-after"]) <= 60

    async def test_a_hard_objective_that_cannot_be_met(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (router, client):
            slow = CalibrationUpdated(coefficients=SLOW, samples=1, error_before=1, error_after=0)
            await router.tell(slow, sender="controller", source="controller")
            headers = {"x-vertumnus-slo": "hard", "x-vertumnus-ttft-slo-ms": "900"}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "slo_unattainable")
            assert "1,000 ms" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("header", "value"),
        [("x-vertumnus-slo", "maybe"), ("x-vertumnus-priority", "10"), ("x-vertumnus-tenant", "a b")],
    )
    async def test_a_malformed_header_is_named(self, tmp_path: Path, header: str, value: str) -> None:
        async with served(tmp_path) as (_, client):
            answer = await client.post("/v1/completions", json=BODY, headers={header: value})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")
            assert header in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("api_key_file", b"a b c", "line 1 has 3 words"),
        ("block_key_file", b"k" * 31, "31 bytes; at least 32"),
        ("api_key_file", b"\n", "holds no key"),
        ("coefficients", b"unknown", "is not one of"),
    ],
)
def test_bad_settings_name_the_field(tmp_path: Path, field: str, content: bytes, message: str) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"k" * 32)
    bad.write_bytes(content)
    value = content.decode() if field == "coefficients" else bad
    with pytest.raises(ValidationError, match=message) as refused:
        RouterSettings(**{"block_key_file": good, field: value})
    assert refused.value.errors()[0]["loc"] == (field,)


class TestHeaders:
    async def test_the_slo_and_the_trace_reach_the_record(self, tmp_path: Path) -> None:
        trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        assigns: list[Assign] = []

        async def keep(agent: Agent, assign: Assign) -> None:
            assigns.append(assign)
            await serve_some(agent, assign, 4)

        async with served(tmp_path, keep) as (router, client):
            headers = {"x-vertumnus-ttft-slo-ms": "1500", "traceparent": trace}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 200
            [received] = router.told(RequestReceived)
            assert received.slo_us == 1_500_000
            assert assigns[0].traceparent == trace

    async def test_malformed_ones_are_replaced(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (_, client):
            headers = {"x-request-id": "no spaces allowed", "traceparent": "00-zz"}
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 200
            assert len(answer.headers["x-request-id"]) == 36

    async def test_the_decision_is_named(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (router, client):
            answer = await client.post("/v1/completions", json=BODY)
            [assigned] = router.told(RequestAssigned)
            assert answer.headers["x-vertumnus-worker"] == assigned.worker
            assert answer.json()["id"] == f"cmpl-{assigned.request}"


class TestStreams:
    async def test_chunks(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (_, client):
            events = events_of(await client.post("/v1/completions", json={**BODY, "stream": True}))
            assert events[-1] == "[DONE]"
            text = "".join(each["choices"][0]["text"] for each in events[:-1])
            assert text == "".join(f"<{token}> " for token in continuation(PROMPT, 4))
            assert events[-2]["choices"][0]["finish_reason"] == "length"

    async def test_token_ids_on_request(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (_, client):
            body = {**BODY, "return_token_ids": True}
            whole = (await client.post("/v1/completions", json=body)).json()
            assert whole["choices"][0]["token_ids"] == continuation(PROMPT, 4)
            chunks = events_of(await client.post("/v1/completions", json={**body, "stream": True}))[:-1]
            assert [id_ for each in chunks for id_ in each["choices"][0]["token_ids"]] == continuation(PROMPT, 4)

    async def test_a_failure_behind_the_first_token_is_the_last_event(self, tmp_path: Path) -> None:
        async def break_off(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 2)
            await agent.die()

        async with served(tmp_path, break_off) as (_, client):
            events = events_of(await client.post("/v1/completions", json={**BODY, "stream": True}))
            assert events[-1]["error"]["code"] == "no_worker"
            assert "[DONE]" not in events

    async def test_a_stop_string_in_a_stream_is_a_completion(self, tmp_path: Path) -> None:
        text = ModelText(write_model_dir(tmp_path / "model"))

        async def words(agent: Agent, assign: Assign) -> None:
            for index in range(50):
                await agent.frame(assign, index, [1_000 + index])

        async with served(tmp_path, words, text) as (router, client):
            body = {"model": "toy", "prompt": "x", "max_tokens": 100, "stream": True, "stop": "5 w1006"}
            events = events_of(await client.post("/v1/completions", json=body))
            assert events[-1] == "[DONE]"
            shown = "".join(each["choices"][0]["text"] for each in events[:-1])
            assert shown == " w1000 w1001 w1002 w1003 w1004 w100"
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
            with_it = events_of(await client.post("/v1/completions", json=body | {"include_stop_str_in_output": True}))
            assert "".join(each["choices"][0]["text"] for each in with_it[:-1]) == shown + "5 w1006"
            await router.settled()
            assert [each.finish for each in router.told(RequestCompleted)] == ["stop", "stop"]

    async def test_a_chat_ends_at_the_models_stop_token_and_does_not_show_it(self, tmp_path: Path) -> None:
        text = ModelText(write_model_dir(tmp_path / "model"))
        [stop] = text.stop_tokens

        async def say(agent: Agent, assign: Assign) -> None:
            assert assign.stop_tokens == (stop,)
            await agent.frame(assign, 0, text.encode("hi", 9).tolist())
            await agent.frame(assign, 2, [stop], finish="stop")

        async with served(tmp_path, say, text) as (_, client):
            body = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == "hi"
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 3


class TestStatuses:
    async def test_no_worker(self, tmp_path: Path) -> None:
        async def die(agent: Agent, assign: Assign) -> None:
            await agent.die()

        async with served(tmp_path, die) as (_, client):
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert answer.json()["error"]["type"] == "server_error"
            assert answer.headers["retry-after"] == "5"

    async def test_no_first_token(self, tmp_path: Path) -> None:
        async def hang(agent: Agent, assign: Assign) -> None:
            await agent.claim(assign)

        async with served(tmp_path, hang, first_token_slack_s=0.1) as (_, client):
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
            assert int(answer.headers["retry-after"]) >= 1

    async def test_too_many_at_once(self, tmp_path: Path) -> None:
        async with served(tmp_path, open_requests_max=1) as (router, client):
            slot = router.dispatcher.enter()
            answer = await client.post("/v1/completions", json=BODY)
            slot.release()
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert answer.headers["retry-after"] == "1"
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200

    async def test_our_own_fault_shows_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with served(tmp_path) as (router, client):

            async def fail(*_: object) -> None:
                raise RuntimeError("secret detail")

            monkeypatch.setattr(router.dispatcher, "submit", fail)
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert "secret" not in answer.text
            assert router.dispatcher.open_requests == 0

    async def test_before_the_first_node_there_is_no_model(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:
            app, *_ = app_of(router)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
                answer = await client.post("/v1/completions", json=BODY)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")

    async def test_a_body_that_does_not_arrive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bodies, "READ_S_MAX", 0.05)

        async def trickle() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(1)

        async with served(tmp_path) as (router, client):
            answer = await client.post("/v1/completions", content=trickle())
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
            assert router.dispatcher.open_requests == 0

    async def test_bodies_together(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bodies, "TOGETHER_BODIES", 1)

        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b" " * 900
            begun.set()
            await go_on.wait()
            yield json.dumps(BODY).encode()

        async with served(tmp_path, body_bytes_max=1_024) as (_, client):
            first = asyncio.ensure_future(client.post("/v1/completions", content=slowly()))
            await begun.wait()
            second = await client.post("/v1/completions", content=b" " * 200)
            assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            go_on.set()
            assert (await first).status_code == 200
            assert (await client.post("/v1/completions", content=slowly())).status_code == 200, "its room is free again"

    async def test_refusals_are_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.router.refusals.TELL_EVERY_S", 0.02)
        async with served(tmp_path) as (router, client):
            for body in ({}, {}, {**BODY, "model": "other"}):
                await client.post("/v1/completions", json=body)
            await eventually(lambda: router.told(RequestsRefused))
        told: Counter[str] = Counter()
        for each in router.told(RequestsRefused):
            told[each.reason] += each.count
        assert told == {"invalid": 2, "unknown-model": 1}, "each is told once"
