"""What of a server's refusal is repeated: its sentence, and never what it quotes."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from services.worker.engine.protocol import EngineError
from services.worker.engine.sglang.server import Server

SENTENCE = "the input is longer than the model's context"


def refusing(answer: Any) -> Server:
    """A client of a server that refuses everything in these words."""
    app = FastAPI()

    @app.post("/generate")
    async def generate() -> Response:
        return JSONResponse(answer, status_code=400)

    server = Server("http://n:1", None)
    server.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=server.url)
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
