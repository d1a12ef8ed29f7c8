"""The client's half of the OpenAI API: bodies, and streams cut into pieces anywhere."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.trace.wire import LINE_BYTES_MAX, BadStream, TokenStream, chat_body, completion_body
from simulation.workloads.rows import Row

ROW = Row(0, 700, 20, (1, 2))

COMPLETION = (
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[{"text":"Paris","finish_reason":null}]}\r\n\r\n'
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":710,"completion_tokens":7,'
    b'"prompt_tokens_details":{"cached_tokens":512}}}\n\n'
    b"data: [DONE]\n\n"
)
CHAT = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
    b'data: {"choices":[{"delta":{"content":"Pa"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"ris"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
)


def test_a_completion_carries_token_ids() -> None:
    body = orjson.loads(completion_body(ROW, "m"))
    assert len(body["prompt"]) == 700
    assert all(type(token) is int for token in body["prompt"])
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 20, True)


def test_a_chat_carries_words() -> None:
    body = orjson.loads(chat_body(ROW._replace(output_tokens=0), "m"))
    [message] = body["messages"]
    assert len(message["content"].split(" ")) == 700
    assert body["max_tokens"] == 1


@given(st.lists(st.integers(0, len(COMPLETION)), max_size=12))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    stream = TokenStream()
    edges = sorted({0, *cuts, len(COMPLETION)})
    for start, end in pairwise(edges):
        stream.feed(COMPLETION[start:end], at_ns=end)
    assert stream.finish == "length"
    assert (stream.prompt_tokens(700), stream.output_tokens, stream.cached_tokens) == (710, 7, 512)
    # The piece that held "Paris", not the empty one before it.
    assert COMPLETION.index(b"Paris") < stream.check_complete() <= edges[-1]


def test_tokens_of_a_chat_are_timed() -> None:
    stream = TokenStream()
    for at_ns, event in enumerate(CHAT.split(b"\n\n")):
        stream.feed(event + b"\n\n", at_ns)
    assert (stream.check_complete(), stream.last_ns) == (1, 3)
    assert (stream.prompt_tokens(700), stream.output_tokens, stream.cached_tokens) == (700, 3, 0)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'data: {"error":{"message":"lost"}}\n\n', "stream-error"),
        (b"data: {nonsense\n\n", "stream-error"),
        (b"x" * (LINE_BYTES_MAX + 1), "stream-error"),
    ],
)
def test_what_is_no_answer_is_named(data: bytes, kind: str) -> None:
    with pytest.raises(BadStream) as caught:
        TokenStream().feed(data, 0)
    assert caught.value.kind == kind


def test_an_answer_without_an_end_is_truncated() -> None:
    stream = TokenStream()
    stream.feed(COMPLETION[: COMPLETION.index(b'"length"') - 40], 1)
    with pytest.raises(BadStream, match="the stream ended after 1 pieces"):
        stream.check_complete()
