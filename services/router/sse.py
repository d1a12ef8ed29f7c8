"""Server-sent events as OpenAI's clients read them: one JSON object per event, then `[DONE]`."""

from typing import Any

import orjson

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"
