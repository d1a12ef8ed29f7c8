"""The OpenAI API as a sender of traces needs it: request bodies as bytes, and a stream of events timed as it arrives. Pure."""

from typing import Any

import orjson

from cli.trace.prompts import prompt_text, prompt_tokens
from simulation.workloads.rows import Row

LINE_BYTES_MAX = 1024 * 1024
"""One event of a stream; nothing sane is longer."""


class BadStream(Exception):
    """The answer is no stream of OpenAI events, or reports an error. `kind` is the outcome's."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def completion_body(row: Row, model: str, extension: dict[str, Any] | None = None) -> bytes:
    """For `POST /v1/completions`, the prompt as token ids. 0.1 ms for 8,000 tokens. `extension` holds fields that only some
    servers know."""
    return _body(row, model, {"prompt": prompt_tokens(row), **(extension or {})})


def chat_body(row: Row, model: str) -> bytes:
    """For `POST /v1/chat/completions`, the prompt as one user message of words."""
    return _body(row, model, {"messages": [{"role": "user", "content": prompt_text(row)}]})


def _body(row: Row, model: str, prompt: dict[str, Any]) -> bytes:
    document = {
        "model": model,
        **prompt,
        "max_tokens": max(1, row.output_tokens),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


class TokenStream:
    """Events of one answer, fed as they arrive: when tokens came, and what `usage` said at the end."""

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.pieces = 0
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self.token_ids: list[int] = []
        self._rest = b""

    def feed(self, data: bytes, at_ns: int) -> None:
        """Errors: BadStream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise BadStream("stream-error", f"an event of more than {LINE_BYTES_MAX} bytes")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                self._event(payload, at_ns)

    @property
    def output_tokens(self) -> int:
        """By `usage`, else one per piece of text."""
        return int(self.usage.get("completion_tokens", self.pieces))

    def prompt_tokens(self, planned: int) -> int:
        """By `usage`, which knows how words became tokens; else what the trace planned."""
        return int(self.usage.get("prompt_tokens", planned))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server did not compute; 0 where it does not say."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def check_complete(self) -> int:
        """When the first token came. Errors: BadStream unless the answer came to its end."""
        if self.first_ns is None or self.finish is None:
            raise BadStream("truncated", f"the stream ended after {self.pieces} pieces without a finish reason")
        return self.first_ns

    def _event(self, payload: bytes, at_ns: int) -> None:
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise BadStream("stream-error", f"an event is not JSON: {payload[:100]!r}") from error
        if "error" in event:
            raise BadStream("stream-error", str(event["error"])[:200])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            # The last piece of a chat or of a partial character may hold no text; a token came with it all the same.
            self.finish = choice.get("finish_reason") or self.finish
            self.token_ids += choice.get("token_ids") or ()
            if choice.get("text") or (choice.get("delta") or {}).get("content") or self.finish:
                self.pieces += 1
                self.first_ns = self.first_ns or at_ns
                self.last_ns = at_ns
