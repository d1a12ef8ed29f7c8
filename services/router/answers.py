"""What clients get: an answer read off its tokens, in OpenAI's four shapes (chat or completion, whole or in chunks)."""

import codecs
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from services.router.calls import Call
from services.router.text import StopCutter, TextStream
from shared.contracts.commands import TokenLogprobs
from shared.contracts.events import Finish

TokenBytes = Callable[[int], bytes]
"""What one token adds to a text: UTF-8, or a part of a character's."""


class Part(NamedTuple):
    """Some text, the tokens it was read off, their log-probabilities, and in the last part how the answer ended. A token that
    ends an answer shows no text, and its log-probability is not told either."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish | None


async def read(call: Call, stream: TextStream, cutter: StopCutter) -> AsyncIterator[Part]:
    """The answer in parts. The first comes with the first token, even when it shows no text yet; a stop string ends the
    request, but for one that begins within the first `min_tokens`. Errors: Unserved, behind the parts that were given."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    first = True
    unbound = call.order.sampling.min_tokens
    async for piece in call.pieces():
        ends = piece.frame.finish == "stop" and piece.tokens[-1:] and piece.tokens[-1] in call.order.stop_tokens
        shown = len(piece.tokens) - bool(ends)
        tokens += piece.tokens
        logprobs += piece.logprobs[:shown]
        early = min(shown, max(0, unbound))
        unbound -= shown
        text = stream.push(piece.tokens[:early])
        cut = cutter.push(stream.push(piece.tokens[early:shown]))
        text += cut.text
        if cut.stopped:
            call.enough()
            yield Part(text, tuple(tokens), tuple(logprobs), "stop")
            return
        if text or first:
            yield Part(text, tuple(tokens), tuple(logprobs), None)
            tokens, logprobs, first = [], [], False
    cut = cutter.push(stream.flush())
    rest = "" if cut.stopped else cutter.flush()
    yield Part(cut.text + rest, tuple(tokens), tuple(logprobs), "stop" if cut.stopped else call.finish)


def usage(call: Call) -> dict[str, Any]:
    """Token counts; cached ones as the worker that gave the first token measured them."""
    prompt_tokens, output_tokens = call.order.prompt_tokens, len(call.generated)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": call.served.first.cached_tokens if call.served else 0},
    }


class Shape(Protocol):
    """How one endpoint writes an answer."""

    def whole(self, parts: Sequence[Part], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer as one object."""

    def chunk(self, part: Part, *, first: bool) -> dict[str, Any]:
        """One part as one chunk of a stream."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk behind the last part."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of an answer repeats. `created` is in seconds since the epoch."""

    id: str
    model: str
    created: int

    def of(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`chat.completion`. `alternatives` None tells no log-probabilities, `token_ids` tells the tokens themselves."""

    head: Head
    token_bytes: TokenBytes
    alternatives: int | None
    token_ids: bool

    def whole(self, parts: Sequence[Part], usage: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(part.text for part in parts), "refusal": None},
            "logprobs": self._logprobs(each for part in parts for each in part.logprobs),
            "finish_reason": parts[-1].finish,
            **_token_ids(self.token_ids, parts),
        }
        return self.head.of("chat.completion", [choice], usage=usage)

    def chunk(self, part: Part, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if part.text or first:
            delta["content"] = part.text
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(part.logprobs),
            "finish_reason": part.finish,
            **_token_ids(self.token_ids, [part]),
        }
        return self.head.of("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self.head.of("chat.completion.chunk", [], usage=usage)

    def _logprobs(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        content = []
        for token in tokens:
            top = [self._entry(*each) for each in most_likely(token, self.alternatives)]
            content.append({**self._entry(*token.alternatives[0]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """The `bytes` of neighbours put together give the characters that none of them has whole."""
        raw = self.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


@dataclass(slots=True)
class CompletionShape:
    """`text_completion`. `alternatives` None tells no log-probabilities, `token_ids` tells the tokens themselves. One for each
    answer, because it counts the characters that were told: `text_offset` goes on from chunk to chunk."""

    head: Head
    token_bytes: TokenBytes
    alternatives: int | None
    token_ids: bool
    _characters: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def whole(self, parts: Sequence[Part], usage: dict[str, Any]) -> dict[str, Any]:
        return self.head.of("text_completion", [self._choice(parts)], usage=usage)

    def chunk(self, part: Part, *, first: bool) -> dict[str, Any]:  # noqa: ARG002 - a chat's first chunk has a role
        return self.head.of("text_completion", [self._choice([part])])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self.head.of("text_completion", [], usage=usage)

    def _choice(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {
            "index": 0,
            "text": "".join(part.text for part in parts),
            "logprobs": self._logprobs([each for part in parts for each in part.logprobs]),
            "finish_reason": parts[-1].finish,
            **_token_ids(self.token_ids, parts),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        chosen = [token.alternatives[0] for token in tokens]
        return {
            "tokens": [self._name(token) for token, _ in chosen],
            "token_logprobs": [logprob for _, logprob in chosen],
            "top_logprobs": [self._top(token, self.alternatives) for token in tokens],
            "text_offset": [self._offset(token) for token, _ in chosen],
        }

    def _top(self, token: TokenLogprobs, count: int) -> dict[str, float]:
        """The chosen token is told even if it is not one of the most likely."""
        told = (*most_likely(token, count), token.alternatives[0])
        return {self._name(each): logprob for each, logprob in told}

    def _name(self, token: int) -> str:
        """A part of a character goes by its bytes, as OpenAI has it: two of them are never the same key."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _offset(self, token: int) -> int:
        """Where the token's text begins; one inside a character begins where the character does."""
        offset = self._characters
        self._characters += len(self._decoder.decode(self.token_bytes(token)))
        return offset


def most_likely(token: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens, whether the chosen one is among them or not. An engine tells it first, and the others
    behind it."""
    return sorted(token.alternatives, key=lambda each: (-each[1], each[0]))[:count]


def _token_ids(wanted: bool, parts: Iterable[Part]) -> dict[str, Any]:
    return {"token_ids": [token for part in parts for token in part.tokens]} if wanted else {}
