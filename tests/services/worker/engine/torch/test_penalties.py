"""What penalties and biases leave of the model's logits: by hand, and as `transformers` and a loop over tokens have it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.past import past_of
from services.worker.engine.protocol import EngineError, Sampling
from services.worker.engine.torch.checks import check_sampling
from services.worker.engine.torch.penalties import Said
from services.worker.engine.torch.sampling import choose

LOGITS = torch.tensor([4.0, 3.0, -2.0, 1.0, 0.0], dtype=torch.float64)
PAST = Past(prompt=(0, 2), generated=(1, 1, 3))


def left(sampling: Sampling, past: Past = PAST, said: tuple[int, ...] = ()) -> list[float]:
    state = Said(sampling, past, len(LOGITS))
    for token in said:
        state.say(token)
    return state.adjusted(LOGITS).tolist()


def test_each_field_by_hand() -> None:
    assert left(Sampling(presence_penalty=0.5)) == [4.0, 2.5, -2.0, 0.5, 0.0]
    assert left(Sampling(frequency_penalty=0.5)) == [4.0, 2.0, -2.0, 0.5, 0.0]
    assert left(Sampling(frequency_penalty=-1.0), said=(4, 4)) == [4.0, 5.0, -2.0, 2.0, 2.0]
    assert left(Sampling(repetition_penalty=2.0)) == [2.0, 1.5, -4.0, 0.5, 0.0], "the prompt and what was generated"
    assert left(Sampling(repetition_penalty=0.5), NO_PAST, said=(2,)) == [4.0, 3.0, -1.0, 1.0, 0.0]
    assert left(Sampling(logit_bias=((4, 7.5), (0, -100.0)))) == [-96.0, 3.0, -2.0, 1.0, 7.5]
    both = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25, logit_bias=((1, 1.0),))
    assert left(both) == [2.0, 1.5 - 0.5 - 1.0 + 1.0, -4.0, 0.5 - 0.25 - 1.0, 0.0], "the repetition penalty comes first"


def test_no_stop_token_comes_before_so_many_others() -> None:
    early = Sampling(min_tokens=2, stops=(0, 4))
    assert [left(early, said=said)[0] for said in ((), (1,), (1, 2))] == [-math.inf, -math.inf, 4.0]
    assert [choose(LOGITS, early, 9, Said(early, NO_PAST, 5)).token for _ in range(2)] == [1, 1]
    hot = Sampling(temperature=1.0, min_tokens=1, stops=(0,))
    assert 0 not in {choose(LOGITS, hot, position, Said.by(hot, NO_PAST, 5)).token for position in range(300)}


def test_logprobs_are_those_of_the_model_whatever_is_chosen() -> None:
    pushed = Sampling(logprobs=1, logit_bias=((2, 100.0),))
    token = choose(LOGITS, pushed, 3, Said.by(pushed, NO_PAST, 5))
    logprobs = torch.log_softmax(LOGITS, 0).tolist()
    assert token.logprobs == ((2, logprobs[2]), (0, logprobs[0]))


def test_plain_fields_need_no_memory_of_what_was_said() -> None:
    assert Said.by(Sampling(0.7, 0.9, 3, 2, 40, 0.1), NO_PAST, 5) is None
    assert Said.by(Sampling(min_tokens=3), NO_PAST, 5) is None, "there is no stop token to hold back"


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6), prompt=st.lists(st.integers(0, 29), min_size=1, max_size=40),
    generated=st.lists(st.integers(0, 29), max_size=40), said=st.lists(st.integers(0, 29), max_size=5),
    repetition=st.floats(0.01, 2), presence=st.floats(-2, 2), frequency=st.floats(-2, 2),
    biases=st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=4),
)  # fmt: skip
def test_they_leave_what_transformers_and_the_definitions_leave(
    seed: int,
    prompt: list[int],
    generated: list[int],
    said: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    biases: dict[int, float],
) -> None:
    """OpenAI: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, of what was generated."""
    logits_V = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = Sampling(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(biases.items()),
    )
    tokens = np.array([*prompt, *generated], dtype=np.uint32)
    state = Said(sampling, past_of(tokens, len(generated), sampling), 30)
    for token in said:
        state.say(token)
    everything = torch.tensor([[*prompt, *generated, *said]])
    expected = RepetitionPenaltyLogitsProcessor(repetition)(everything, logits_V[None].clone())[0].tolist()
    for token in range(30):
        times = [*generated, *said].count(token)
        expected[token] += biases.get(token, 0.0) - frequency * times - presence * (times > 0)
    assert state.adjusted(logits_V).tolist() == pytest.approx(expected, abs=1e-9)
    assert not logits_V.equal(torch.zeros(30)), "the model's own logits are left alone"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Sampling(logit_bias=((50, 1.0),)), "logit_bias: id 50 is outside the vocabulary of 50"),
        (Sampling(logit_bias=((-1, 1.0),)), "logit_bias: id -1 is outside the vocabulary of 50"),
        (Sampling(logit_bias=((1, math.inf),)), "logit_bias: inf of id 1 is outside"),
        (Sampling(logit_bias=((1, math.nan),)), "logit_bias: nan of id 1 is outside"),
        (Sampling(min_tokens=1, stops=(3, 99)), "stop_tokens: id 99 is outside the vocabulary of 50"),
        (Sampling(min_tokens=1, stops=tuple(range(50))), "stop_tokens: all 50 of the vocabulary"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty: 0.0 is outside"),
        (Sampling(json_schema="{}"), "json_schema: the torch engine has no grammars"),
    ],
    ids=["bias", "bias below 0", "infinite bias", "no bias", "stop", "stops", "repetition", "grammar"],
)
def test_what_is_out_of_bounds_is_refused_by_name(wrong: Sampling, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        check_sampling(wrong, 50)


@pytest.mark.parametrize("past", [Past((50,)), Past((), (-1,))], ids=["prompt", "generated"])
def test_a_past_outside_the_vocabulary_is_refused(past: Past) -> None:
    with pytest.raises(EngineError, match=r"past: id (50|-1) is outside the vocabulary of 50"):
        check_sampling(Sampling(repetition_penalty=1.5), 50, past)
