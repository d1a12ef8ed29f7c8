"""What is asked of `/generate`, and what recorded answers mean."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.continuation import Continuation
from services.worker.engine.protocol import EngineError, Sampling
from services.worker.engine.sglang.generation import ROOMS, Answers, Pairing, Part, body, room_for
from services.worker.engine.sglang.prefills import step_s
from tests.services.worker.engine.sglang.recordings import item, recorded


def asked(name: str) -> dict[str, Any]:
    return recorded()[name]["asked"]


def parts_of(name: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in recorded()[name]["lines"]]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def without_tokens(whole: dict[str, Any]) -> dict[str, Any]:
    return {**whole, "input_ids": f"{len(whole['input_ids'])} tokens"}


def test_bodies_are_those_that_a_server_took() -> None:
    assert without_tokens(body(item("a", 83), "a", None, None)) == asked("cold")
    streamed = item("c", 83, then=Continuation(6, frozenset(), 0))
    assert without_tokens(body(streamed, "c", None, None)) == asked("stream")
    assert without_tokens(body(item("e", 83, sampling=Sampling(logprobs=1)), "e", None, None)) == asked("logprobs")


def test_what_leaves_tokens_out_is_told_where_it_was_asked_for() -> None:
    plain = body(item("a", 83), "a", None, None)["sampling_params"]
    told = body(item("a", 83, sampling=Sampling(top_k=5, min_p=0.25)), "a", None, None)["sampling_params"]
    assert told == {**plain, "top_k": 5, "min_p": 0.25}


def test_fields_are_told_by_sglang_s_names_and_not_of_a_share() -> None:
    sampling = Sampling(
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias=((5, -2.0),), min_tokens=9,
        stops=(3,), json_schema='{"type": "object"}',
    )  # fmt: skip
    then = Continuation(6, frozenset({3}), 0)
    plain = body(item("a", 83, then=then), "a", None, None)["sampling_params"]
    told = body(item("a", 83, then=then, sampling=sampling), "a", None, None)["sampling_params"]
    assert {name: value for name, value in told.items() if name not in plain} == {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -2.0},
        "min_new_tokens": 6,
        "json_schema": '{"type": "object"}',
    }
    share = body(item("a", 83, until=32, then=then, sampling=sampling), "a", None, None)["sampling_params"]
    assert not {"min_new_tokens", "json_schema", "logit_bias"} & share.keys()


def test_stop_tokens_need_the_end_tokens_of_the_model_to_count() -> None:
    """With `ignore_eos` SGLang ignores every stop token: seen on a server."""
    with_stop = body(item("a", 83, then=Continuation(6, frozenset({9, 3}), 0)), "a", None, None)["sampling_params"]
    assert (with_stop["stop_token_ids"], with_stop["ignore_eos"]) == ([3, 9], False)
    without = body(item("a", 83, then=Continuation(6, frozenset(), 0)), "a", None, None)["sampling_params"]
    assert without["ignore_eos"]


def test_a_share_of_a_prompt_is_a_prompt_of_its_own() -> None:
    share = body(item("a", 83, until=32, then=Continuation(6, frozenset(), 0)), "a", 3, None)
    assert (len(share["input_ids"]), share["stream"], share["sampling_params"]["max_new_tokens"]) == (32, False, 1)
    assert share["routed_dp_rank"] == 3


def test_a_prompt_without_a_whole_block_has_a_salt_of_its_own() -> None:
    salts = {body(item(name, 15), name, None, None)["cache_salt"] for name in ("a", "b")}
    assert salts == {"request a", "request b"}
    assert body(item("a", 16), "a", None, None)["cache_salt"] == item("b", 16).chain[0].hex()


def test_a_pairing_says_where_decode_meets_prefill() -> None:
    whole = body(item("a", 16), "a", None, Pairing("10.0.0.1", 8998, 7))
    assert [whole[f"bootstrap_{key}"] for key in ("host", "port", "room")] == ["10.0.0.1", 8998, 7]


@given(st.integers(0, ROOMS - 1), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_room_is_its_unit_s_by_sglang_s_own_rule(drawn: int, units: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, units - 1))
    room = room_for(drawn, unit, units)
    assert room % units == unit
    assert 0 <= room < 2**63
    assert room_for(drawn, None, units) == drawn


@given(st.integers())
def test_any_seed_is_one_that_sglang_takes(seed: int) -> None:
    sent = body(item("a", 16, sampling=Sampling(seed=seed)), "a", None, None)["sampling_params"]["sampling_seed"]
    assert -(2**63) <= sent < 2**63
    assert (sent - seed) % 2**64 == 0


# --- answers


def test_a_cold_and_a_warm_prefill() -> None:
    cold, warm = (Answers(False).read(recorded()[name]["answer"]) for name in ("cold", "warm"))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 80)
    assert cold.tokens == warm.tokens
    assert cold.finish == "length"
    assert cold.began_s is not None
    assert cold.ended_s is not None
    assert 0 < cold.ended_s - cold.began_s < 60


def test_a_stream_brings_each_token_once() -> None:
    answers, parts = Answers(False), parts_of("stream")
    read = [answers.read(part) for part in parts]
    assert [token.token for part in read for token in part.tokens] == parts[-1]["output_ids"]
    assert [part.finish for part in read] == [None] * (len(read) - 1) + ["length"]


def test_a_stream_of_increments_is_the_same_stream() -> None:
    """`--incremental-streaming-output` leaves out what was sent before."""
    whole = parts_of("stream")
    cuts = [0, *(len(part["output_ids"]) for part in whole)]
    pieces = [{**part, "output_ids": part["output_ids"][cuts[n] :]} for n, part in enumerate(whole)]
    cumulated, incremental = Answers(False), Answers(True)
    assert [cumulated.read(part) for part in whole] == [incremental.read(part) for part in pieces]


def test_a_stop_token_is_part_of_the_answer() -> None:
    parts = parts_of("stopped")
    answers = Answers(False)
    tokens = [token.token for part in parts for token in answers.read(part).tokens]
    assert tokens[-1] == parts[-1]["meta_info"]["finish_reason"]["matched"]
    assert tokens == parts_of("stream")[3]["output_ids"]


def test_the_chosen_token_s_probability_comes_first_and_once() -> None:
    (token,) = Answers(False).read(recorded()["logprobs"]["answer"]).tokens
    assert token.logprobs[0][0] == token.token
    assert len({each for each, _ in token.logprobs}) == len(token.logprobs) == 2
    assert token.logprobs[0][1] >= token.logprobs[1][1]


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([(100.0, 100.5), (100.25, 100.75)], 0.75),
        ([(100.0, 100.5), (None, None)], 2.0),
        ([(100.0, 90.0)], 2.0),
        ([(100.0, 103.0)], 2.0),
        ([], 2.0),
    ],
    ids=["told", "told of one alone", "clock set back", "clock set forward", "nobody told"],
)
def test_a_step_takes_what_the_server_says_unless_it_cannot_be(
    times: list[tuple[float | None, float | None]], seconds: float
) -> None:
    parts = [None, *(Part((), 0, None, "", began, ended) for began, ended in times)]
    assert step_s(parts, 2.0) == seconds


@pytest.mark.parametrize("broken", [{}, {"output_ids": [1]}, {"output_ids": 1, "meta_info": {}}])
def test_another_version_s_answer_is_an_error_and_no_crash(broken: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"0\.5\.23"):
        Answers(False).read(broken)


def test_an_abort_is_a_finish_with_its_reason() -> None:
    part = Answers(False).read(
        {
            "output_ids": [],
            "meta_info": {
                "finish_reason": {"type": "abort", "message": "Aborted"},
                "prompt_tokens": 3,
                "cached_tokens": 0,
            },
        }
    )
    assert part == Part((), 0, "abort", "Aborted", None, None)
