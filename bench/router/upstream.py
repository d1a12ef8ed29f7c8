"""What the routers that forward are measured in front of: an engine that answers at once, and says what they ask of one.

uvicorn bench.router.upstream:app
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]

CHOICE = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ANSWER = {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}
WHOLE = json.dumps(ANSWER).encode()
STREAM = b"data: " + json.dumps({**ANSWER, "usage": None}).encode() + b"\n\ndata: [DONE]\n\n"
ABOUT = json.dumps({"status": "ok", "model_path": "m", "served_model_name": "m", "data": [{"id": "m"}]}).encode()


async def app(scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
    """ASGI, and no framework: what is measured is in front of it."""
    if scope["type"] != "http":
        return
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["method"] == "GET":
        await _answer(send, ABOUT, b"application/json")
    elif json.loads(body).get("stream"):
        await _answer(send, STREAM, b"text/event-stream")
    else:
        await _answer(send, WHOLE, b"application/json")


async def _answer(send: Send, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
