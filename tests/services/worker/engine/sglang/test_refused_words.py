"""What of a server's refusal is repeated: its sentence, and never what it quotes."""

from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from services.worker.engine.protocol import EngineError
from services.worker.engine.sglang.server import Server
from tests.services.worker.engine.sglang.recordings import facts_told

SENTENCE = "the input is longer than the model's context"


def refusing(answer: Any) -> Server:
    """A client of a server that refuses everything in these words."""
    app = FastAPI()

    @app.post("/generate")
    async def generate() -> Response:
        return JSONResponse(answer, status_code=400)

    return answering(httpx.ASGITransport(app))


def answering(transport: httpx.AsyncBaseTransport) -> Server:
    """A client of what answers so."""
    server = Server("http://n:1", None)
    server.http = httpx.AsyncClient(transport=transport, base_url=server.url)
    return server


@pytest.mark.parametrize("answer", [{"error": {"message": SENTENCE}}, {"error": SENTENCE}, {"message": SENTENCE}])
async def test_a_sentence_is_repeated(answer: Any) -> None:
    with pytest.raises(EngineError, match=SENTENCE):
        await refusing(answer).generate({})


@pytest.mark.parametrize(
    "answer",
    [{"detail": [{"loc": ["input_ids"], "input": [101, 2023]}]}, [101, 2023], {"error": {"input": [101, 2023]}}],
)
async def test_what_was_sent_is_not(answer: Any) -> None:
    with pytest.raises(EngineError, match="400") as refused:
        await refusing(answer).generate({})
    assert "2023" not in str(refused.value)


async def test_a_part_of_a_stream_may_be_a_refusal() -> None:
    part = {"error": {"message": SENTENCE, "input": [101, 2023]}}
    answers = httpx.Response(200, content=b"data: " + orjson.dumps(part) + b"\n\n")
    server = answering(httpx.MockTransport(lambda _: answers))
    with pytest.raises(EngineError, match=SENTENCE) as refused:
        await anext(server.stream({}))
    assert "2023" not in str(refused.value)


async def test_a_server_that_takes_no_orders_with_this_key_is_not_joined() -> None:
    """What SGLang does that has an admin key and no other."""

    def answer(request: httpx.Request) -> httpx.Response:
        orders = request.url.path == "/abort_request"
        return httpx.Response(401, json={"error": "Unauthorized"}) if orders else httpx.Response(200, json=facts_told())

    server = answering(httpx.MockTransport(answer))
    assert (await server.facts()).page_size == 16
    with pytest.raises(EngineError, match=r"401: Unauthorized .*--admin-api-key"):
        await server.join()
