"""Answers come out as whole characters, and end exactly before a stop string, wherever tokens are cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text import DecodedStream, IdStream, StopCutter


def byte_decode(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def sentencepiece_decode(tokens: Sequence[int]) -> str:
    """A decoder that strips the first token's leading space, as Llama 2's does."""
    return "".join((" a", " b", "c")[token] for token in tokens).removeprefix(" ")


@given(st.text(max_size=60), st.text(max_size=5))
def test_the_pieces_are_the_text(text: str, prompt: str) -> None:
    stream = DecodedStream(byte_decode, list(prompt.encode()))
    pieces = [stream.push([token]) for token in text.encode()] + [stream.flush()]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=60), st.text("abc", min_size=1, max_size=10))
def test_whole_text_behind_broken_bytes_is_whole(raw: bytes, text: str) -> None:
    stream = DecodedStream(byte_decode)
    shown = "".join(stream.push([token]) for token in raw + text.encode())
    assert shown.endswith(text)


def test_a_token_keeps_its_space_behind_the_prompt() -> None:
    assert DecodedStream(sentencepiece_decode, [0]).push([1, 2]) == " bc"
    assert DecodedStream(sentencepiece_decode).push([1, 2, 0]) == "bc a"


def test_without_a_tokenizer_ids_can_be_read_back() -> None:
    assert IdStream().push([5, 1000]) == "<5> <1000> "


def cut(pieces: Sequence[str], stops: Sequence[str], *, shown_stop: bool = False) -> tuple[str, bool]:
    cutter = StopCutter(stops, shown=shown_stop)
    shown = ""
    for piece in pieces:
        text, stopped = cutter.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + cutter.flush(), False


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_cuts_where_a_search_of_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = cut(pieces, stops)
    # The text as far as it had come when the first stop was complete.
    for count in range(len(pieces) + 1):
        text = "".join(pieces[:count])
        found = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            assert (shown, stopped) == (text[:found], True)
            return
    assert (shown, stopped) == ("".join(pieces), False)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_a_stop_that_is_shown_comes_behind_what_it_would_have_ended(pieces: list[str], stops: list[str]) -> None:
    hidden, stopped = cut(pieces, stops)
    shown, stopped_too = cut(pieces, stops, shown_stop=True)
    assert stopped_too == stopped
    assert shown.removeprefix(hidden) in (stops if stopped else [""])
    assert shown.startswith(hidden)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_never_shows_what_it_would_have_to_take_back(pieces: list[str], stops: list[str]) -> None:
    final, _ = cut(pieces, stops)
    cutter = StopCutter(stops)
    shown = ""
    for piece in pieces:
        text, stopped = cutter.push(piece)
        shown += text
        assert final.startswith(shown)
        if stopped:
            break


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld"], ["world"], ("Hello ", True)),
        (["a\n", "\nb"], ["\n\n"], ("a", True)),
        (["a\n", "b"], ["\n\n"], ("a\nb", False)),
        (["xyz"], [], ("xyz", False)),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: tuple[str, bool]) -> None:
    assert cut(pieces, stops) == expected
