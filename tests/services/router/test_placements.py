"""Placements for other gateways: how they are asked for, how they end, and that nothing stays reserved."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from router_app import KEY, served
from router_front import Front
from router_pool import write_model_dir

from services.router.tokenizer import ModelText
from shared.contracts.events import (
    ENDS,
    BlocksStored,
    NodeLost,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestReceived,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId
from shared.model.blocks import block_chain, block_key
from tests.support.replica import eventually

PLACEMENTS = "/v1/placements"
IDS = list(range(100, 148))
BODY = {"model": "toy", "prompt": IDS, "max_tokens": 4}


def chain() -> list[bytes]:
    return [bytes(each) for each in block_chain(np.asarray(IDS, dtype=np.uint32), 16, block_key(KEY, "default"))]


async def reserved(router: Front) -> bool:
    """Whether anything is; the log has everything."""
    await eventually(lambda: not router.outbox.events)
    router.state.loads.check()
    return bool(router.state.loads.open or router.state.loads.of_worker)


async def test_a_placement_is_decided_recorded_and_reserved_until_its_end(tmp_path: Path) -> None:
    async with served(tmp_path) as (router, client):
        answer = await client.post(PLACEMENTS, json=BODY, headers={"x-vertumnus-ttft-slo-ms": "1500"})
        assert answer.status_code == 201
        told = answer.json()
        [received], [assigned] = router.told(RequestReceived), router.told(RequestAssigned)
        assert (received.placed_only, received.prompt_tokens, received.max_tokens) == (True, 48, 4)
        assert (received.block_ids, received.slo_us) == (b"".join(chain()), 1_500_000)
        assert told["id"] == received.request == assigned.request
        assert (told["worker"], told["node"], told["degree"]) == ("n0/1/0", "n0", 4)
        assert [each["worker"] for each in told["candidates"]] == ["n0/1/0"]
        assert told["candidates"][0]["price_us"] == assigned.candidates[0].price_us
        assert await reserved(router)

        assert (await client.post(f"{PLACEMENTS}/{told['id']}/started")).status_code == 200
        report = {"ttft_ms": 12.5, "queue_ms": 2, "prefill_ms": 9.5, "output_tokens": 7}
        assert (await client.post(f"{PLACEMENTS}/{told['id']}/completed", json=report)).status_code == 200
        assert not await reserved(router)
        [completed] = router.told(RequestCompleted)
        assert (completed.ttft_us, completed.queue_us, completed.prefill_us) == (12_500, 2_000, 9_500)
        assert (completed.handoff_us, completed.output_tokens, completed.worker) == (1_000, 7, "n0/1/0")
        assert router.dispatcher.open_requests == 0
        assert (await client.post(f"{PLACEMENTS}/{told['id']}/completed", json=report)).status_code == 404


async def test_every_form_of_a_prompt_is_the_same_prompt(tmp_path: Path) -> None:
    text = ModelText(write_model_dir(tmp_path / "model"))
    async with served(tmp_path, text=text) as (router, client):
        words = "All work and no play makes Jack a dull boy."
        ids = [int(each) for each in text.encode(words, 4_000)]
        packed = b64encode(b"".join(block_chain(np.asarray(ids, dtype=np.uint32), 16, block_key(KEY, "default"))))
        raw = np.asarray(ids, dtype="<u4").tobytes()
        answers = [
            await client.post(PLACEMENTS, json={"model": "toy", "prompt": words}),
            await client.post(PLACEMENTS, json={"model": "toy", "prompt": ids}),
            await client.post(PLACEMENTS, json={"block_ids": packed.decode(), "prompt_tokens": len(ids)}),
            await client.post(PLACEMENTS, content=raw, headers={"content-type": "application/octet-stream"}),
            await client.post(PLACEMENTS, json={"model": "toy", "messages": [{"role": "user", "content": words}]}),
        ]
        assert [each.status_code for each in answers] == [201] * 5
        received = router.told(RequestReceived)
        assert len({each.block_ids for each in received[:4]}) == 1
        assert len({each.prompt_tokens for each in received[:4]}) == 1
        assert received[4].prompt_tokens > received[0].prompt_tokens, "a chat has a template"


async def test_what_a_worker_holds_is_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as (router, client):
        told = (await client.post(PLACEMENTS, json=BODY)).json()
        stored = BlocksStored(
            worker=WorkerId("n0/1/0"),
            incarnation=1,
            number=1,
            cause="prefill",
            request=RequestId(told["id"]),
            first_depth=0,
            blocks=2,
        )
        await router.tell(stored, sender="n0")
        again = (await client.post(PLACEMENTS, json=BODY)).json()
        assert (told["cached_tokens"], again["cached_tokens"], again["uncached_tokens"]) == (0, 32, 16)


async def test_a_cancelled_one_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as (router, client):
        told = (await client.post(PLACEMENTS, json=BODY)).json()
        assert (await client.post(f"{PLACEMENTS}/{told['id']}/cancelled")).status_code == 200
        assert not await reserved(router)
        assert [each.request for each in router.told(RequestCancelled)] == [told["id"]]


async def test_what_nobody_reports_ends_by_itself_and_a_start_gives_it_time(tmp_path: Path) -> None:
    async with served(tmp_path, placement_start_s=0.05) as (router, client):
        kept, left = [(await client.post(PLACEMENTS, json=BODY)).json()["id"] for _ in range(2)]
        started = await client.post(f"{PLACEMENTS}/{kept}/started")
        await eventually(lambda: router.told(RequestFailed))
        if started.status_code == 200:  # else this machine took longer than the limit to say so
            assert [each.request for each in router.told(RequestFailed)] == [left]
            assert kept in router.state.loads.open
        assert all(each.reason == "unreported" for each in router.told(RequestFailed))
        assert (await client.post(f"{PLACEMENTS}/{left}/completed", json={"ttft_ms": 1})).status_code == 404


async def test_a_router_that_stops_ends_what_is_open(tmp_path: Path) -> None:
    async with served(tmp_path) as (router, client):
        for _ in range(3):
            assert (await client.post(PLACEMENTS, json=BODY)).status_code == 201
    assert [each.reason for each in router.told(RequestFailed)] == ["shutdown"] * 3
    ended = [each.request for each in router.events if isinstance(each, ENDS)]
    assert sorted(ended) == sorted(each.request for each in router.told(RequestReceived))


async def test_open_placements_are_bounded(tmp_path: Path) -> None:
    async with served(tmp_path, open_requests_max=2) as (_, client):
        answers = [await client.post(PLACEMENTS, json=BODY) for _ in range(3)]
        assert [each.status_code for each in answers] == [201, 201, 429]
        assert answers[2].headers["retry-after"]
        await client.post(f"{PLACEMENTS}/{answers[0].json()['id']}/cancelled")
        assert (await client.post(PLACEMENTS, json=BODY)).status_code == 201


async def test_without_a_worker_there_is_no_placement(tmp_path: Path) -> None:
    async with served(tmp_path, no_worker_wait_s=0) as (router, client):
        await router.tell(NodeLost(node=NodeId("n0"), incarnation=1, reason="test"), sender="n0")
        answer = await client.post(PLACEMENTS, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert router.dispatcher.open_requests == 0


async def test_a_body_nested_without_end_is_refused(tmp_path: Path) -> None:
    """Deeper than the C stack's or Python's own limit on the way back to a text, and still JSON."""
    deep = '{"a":' * 1_000 + "1" + "}" * 1_000
    asked = '{"model": "toy", "prompt": [1], "response_format": {"type": "json_schema", "json_schema": {"schema": %s}}}'
    async with served(tmp_path) as (router, client):
        for path in (PLACEMENTS, "/v1/completions"):
            answer = await client.post(path, content=asked % deep, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert not router.told(RequestReceived)


JSON = {"content-type": "application/json"}
RAW = {"content-type": "application/octet-stream"}


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b"{", JSON, 400, "no JSON"),
        (b"[]", JSON, 400, "the body is a list, and no object"),
        (b"{}", JSON, 400, "missing required parameter"),
        (b'{"block_ids": "", "prompt_tokens": 5, "else": 1}', JSON, 400, "unsupported parameter: 'else'"),
        (b'{"block_ids": "", "prompt_tokens": 16}', JSON, 400, "16 tokens have 1 whole blocks of 16, 16 bytes each"),
        (b'{"block_ids": "!!", "prompt_tokens": 16}', JSON, 400, "no base64"),
        (b'{"block_ids": "", "prompt_tokens": 0}', JSON, 400, "prompt_tokens"),
        (b'{"block_ids": "", "prompt_tokens": 9999999}', JSON, 400, "at most"),
        (b'{"block_ids": "", "prompt_tokens": 5, "model": "other"}', JSON, 404, "not served"),
        (b'{"model": "toy", "prompt": []}', JSON, 400, "prompt"),
        (b"", RAW, 400, "0 bytes; token ids take 4 each"),
        (b"12345", RAW, 400, "5 bytes; token ids take 4 each"),
        (b"\0" * 4_000_000, RAW, 400, "1000000 tokens; at most"),
    ],
)
async def test_bad_questions_are_refused_by_name(
    tmp_path: Path, content: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    async with served(tmp_path) as (router, client):
        answer = await client.post(PLACEMENTS, content=content, headers=headers)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
        assert not router.told(RequestReceived)
        assert router.dispatcher.open_requests == 0


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({}, "ttft_ms"),
        ({"ttft_ms": -1}, "ttft_ms"),
        ({"ttft_ms": 5, "queue_ms": 3, "prefill_ms": 4}, "less than"),
        ({"ttft_ms": 5, "finish": "tired"}, "finish"),
        ({"ttft_ms": 5, "mood": 1}, "mood"),
    ],
)
async def test_bad_reports_end_nothing(tmp_path: Path, report: dict[str, Any], message: str) -> None:
    async with served(tmp_path) as (router, client):
        told = (await client.post(PLACEMENTS, json=BODY)).json()
        answer = await client.post(f"{PLACEMENTS}/{told['id']}/completed", json=report)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)
        assert await reserved(router)


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret\n")
    async with served(tmp_path, api_key_file=file) as (_, client):
        for path in (PLACEMENTS, f"{PLACEMENTS}/x/started", f"{PLACEMENTS}/x/completed", f"{PLACEMENTS}/x/cancelled"):
            answer: httpx.Response = await client.post(path, json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
