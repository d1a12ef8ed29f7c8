"""What is a prompt of token ids, and what a body must be to be read at all."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.openai import BadRequest, CompletionRequest, parse, read

IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1)


def prompt(told: Any) -> Any:
    return parse(CompletionRequest, read(json.dumps({"model": "m", "prompt": told}).encode())).prompt


@given(IDS, st.booleans())
def test_ids_come_out_as_they_were_sent(ids: list[int], alone: bool) -> None:
    found = prompt(ids if alone else [ids])
    assert (found.dtype, found.tolist()) == (np.uint32, ids)


@given(IDS, st.sampled_from([True, False, -1, 2**32, 2**70, 1.0, None, "1", [1], {}]), st.data())
def test_what_is_no_id_is_no_prompt_wherever_it_is(ids: list[int], other: Any, data: st.DataObject) -> None:
    ids.insert(data.draw(st.integers(1, len(ids))), other)
    with pytest.raises(BadRequest, match=r"^invalid 'prompt': a text or a list of token ids is needed") as refused:
        prompt(ids)
    assert (refused.value.param, refused.value.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize("told", ["", [], [[]], [True], [1.5], [None], {}, 7, None])
def test_what_is_neither_text_nor_ids_is_refused(told: Any) -> None:
    with pytest.raises(BadRequest, match=r"^invalid 'prompt': a text or a list of token ids is needed"):
        prompt(told)


def test_a_text_may_be_in_a_list_of_one() -> None:
    assert prompt("one") == prompt(["one"]) == "one"
    for several in (["one", "two"], [[1], [2]]):
        with pytest.raises(BadRequest, match="one prompt per request is supported, got 2"):
            prompt(several)


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (b"", "the body is no JSON that can be read: EOF", "invalid_json"),
        (b"{", "the body is no JSON that can be read: EOF", "invalid_json"),
        (b'{"model": "\xff\xfe"}', "the body is no JSON that can be read: invalid unicode", "invalid_json"),
        (b"[" * 100_000, "the body is no JSON that can be read: recursion limit", "invalid_json"),
        (b"[1]", "the body is a list, and no object", "invalid_value"),
        (b'"x"', 'the body is "x", and no object', "invalid_value"),
        (b"null", "the body is null, and no object", "invalid_value"),
    ],
    ids=["nothing", "half an object", "no UTF-8", "deep", "a list", "a text", "null"],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, message: str, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(body)
    assert (str(refused.value)[: len(message)], refused.value.code) == (message, code)
