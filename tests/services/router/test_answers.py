"""An answer in parts, read off a request in memory."""

from collections.abc import Sequence
from pathlib import Path

from router_front import Agent, front

from services.router.answers import ChatShape, CompletionShape, Head, Part, read
from services.router.text import IdStream, StopCutter
from shared.contracts.commands import SamplingSpec, TokenLogprobs


class Late:
    """Shows all of its text at the end, as a tokenizer does whose first bytes are half a character."""

    def __init__(self) -> None:
        self._tokens = 0

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += len(tokens)
        return ""

    def flush(self) -> str:
        return f"{self._tokens} tokens"


async def test_the_first_part_comes_with_the_first_token_even_without_text(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        await Agent(router, "n0").start((4,))
        parts = [part async for part in read(await router.submit([11, 12], 3), Late(), StopCutter(()))]
        assert [(part.text, len(part.tokens), part.finish) for part in parts] == [
            ("", 1, None),
            ("3 tokens", 2, "length"),
        ]


async def test_no_stop_string_counts_that_begins_within_the_first_tokens(tmp_path: Path) -> None:
    """Each token's text is `<id> `, so every one of them has the stop string."""
    async with front(tmp_path) as router:
        await Agent(router, "n0").start((4,))
        for least, tokens in ((0, 1), (1, 2), (3, 4)):
            call = await router.submit([11, 12], 6, sampling=SamplingSpec(min_tokens=least))
            parts = [part async for part in read(call, IdStream(), StopCutter(["<"]))]
            assert sum(len(part.tokens) for part in parts) == tokens
            assert "".join(part.text for part in parts).count("<") == least
            assert parts[-1].finish == "stop"


TEXT = "añ👋"
HEAD = Head("id", "m", 0)
BYTES = {number: bytes([byte]) for number, byte in enumerate(TEXT.encode())} | {90: b" ", 91: b"z", 92: b"\xff"}
"""Seven tokens of a byte each, and three that were not chosen."""


def told(token: int, *others: tuple[int, float], logprob: float = -1.0) -> TokenLogprobs:
    """As an engine tells it: the chosen token, then the most likely of the others."""
    return TokenLogprobs(alternatives=((token, logprob), *others))


PARTS = [
    Part("a", (0,), (told(0, (90, -0.5), (91, -2.0)),), None),
    Part("ñ", (1, 2), (told(1, (90, -1.0), (91, -2.0)), told(2, (90, -1.5), (91, -2.0))), None),
    Part("👋", (3, 4, 5, 6), tuple(told(n, (90, -0.1), (92, -0.2), logprob=-9.0) for n in (3, 4, 5, 6)), "stop"),
]


def test_the_most_likely_tokens_of_a_chat_are_told_whether_chosen_or_not() -> None:
    whole = ChatShape(HEAD, BYTES.__getitem__, 2, False).whole(PARTS, {})["choices"][0]["logprobs"]["content"]
    assert [[each["bytes"][0] for each in token["top_logprobs"]] for token in whole] == [
        [ord(" "), ord("a")],
        [TEXT.encode()[1], ord(" ")],
        [TEXT.encode()[2], ord(" ")],
        *4 * [[ord(" "), 0xFF]],
    ]
    assert bytes(byte for token in whole for byte in token["bytes"]).decode() == TEXT
    assert [token["token"] for token in whole][:3] == ["a", "\ufffd", "\ufffd"]
    chunks = [ChatShape(HEAD, BYTES.__getitem__, 2, False).chunk(part, first=False) for part in PARTS]
    assert [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["content"]] == whole


def test_the_alternatives_of_a_completion_hold_the_chosen_token() -> None:
    whole = CompletionShape(HEAD, BYTES.__getitem__, 1, False).whole(PARTS, {})["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in TEXT.encode()[1:])]
    assert whole["text_offset"] == [0, 1, 1, 2, 2, 2, 2], "a part of a character is where the character is"
    assert whole["top_logprobs"][0] == {" ": -0.5, "a": -1.0}
    assert whole["top_logprobs"][2] == {"bytes:\\xb1": -1.0}
    assert whole["top_logprobs"][3] == {" ": -0.1, "bytes:\\xf0": -9.0}
    streaming = CompletionShape(HEAD, BYTES.__getitem__, 1, False)
    chunks = [streaming.chunk(part, first=False)["choices"][0]["logprobs"] for part in PARTS]
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk[name]] == values
    none = CompletionShape(HEAD, BYTES.__getitem__, 0, False).whole(PARTS, {})["choices"][0]["logprobs"]
    assert none["top_logprobs"][0] == {"a": -1.0}
