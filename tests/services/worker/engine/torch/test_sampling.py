"""The choice of a token: what it depends on, and that its frequencies are the probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.worker.engine.protocol import Sampling
from services.worker.engine.torch.sampling import candidates, choose, uniform

LOGITS = torch.tensor([0.0, 2.0, 1.0, 2.0, -5.0])


def test_greedy_takes_the_first_of_equals() -> None:
    assert choose(LOGITS, Sampling(), 3).token == 1
    assert choose(LOGITS, Sampling(seed=99), 4).token == 1


def test_a_choice_depends_on_logits_seed_and_position_alone() -> None:
    hot = Sampling(temperature=1.0, seed=5)
    choices = [choose(LOGITS, hot, position).token for position in range(200)]
    assert choices == [choose(LOGITS.clone(), hot, position).token for position in range(200)]
    assert choices != [choose(LOGITS, Sampling(temperature=1.0, seed=6), position).token for position in range(200)]
    assert len(set(choices)) >= 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    draws = 4000
    counts = torch.zeros(5)
    for position in range(draws):
        counts[choose(LOGITS, Sampling(temperature, seed=1), position).token] += 1
    expected = torch.softmax(LOGITS / temperature, 0)
    assert (counts / draws - expected).abs().max() < 4 * math.sqrt(0.25 / draws)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    def seen(top_p: float) -> set[int]:
        return {choose(LOGITS, Sampling(1.0, top_p, seed=2), position).token for position in range(500)}

    assert seen(1e-9) == {1}
    assert seen(0.6) == {1, 3}  # 0.40 + 0.40
    assert seen(0.9) == {1, 2, 3}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6), temperature=st.floats(0.2, 2), top_k=st.integers(0, 60), top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)  # fmt: skip
def test_what_may_be_chosen_is_what_transformers_leaves(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits_V = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    left = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        left.append(TopKLogitsWarper(top_k))
    left += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    expected_V = torch.softmax(left(torch.zeros(1, 0, dtype=torch.long), logits_V[None])[0], dim=0)
    probabilities_K, tokens_K = candidates(logits_V, Sampling(temperature, top_p, top_k=top_k, min_p=min_p))
    assert set(tokens_K.tolist()) == set(expected_V.nonzero()[:, 0].tolist())
    assert torch.allclose(probabilities_K / probabilities_K.sum(), expected_V[tokens_K])


def test_top_k_leaves_exactly_so_many_and_of_equals_the_first() -> None:
    def seen(**sampling: float) -> set[int]:
        return {choose(LOGITS, Sampling(1.0, seed=2, **sampling), position).token for position in range(500)}  # type: ignore[arg-type]

    assert seen(top_k=1) == {1}
    assert seen(top_k=3) == {1, 2, 3}
    assert seen(min_p=0.5) == {1, 3}  # the third has 0.37 of them
    assert seen(min_p=0.3) == {1, 2, 3}


def test_logprobs_are_those_of_the_model_chosen_first() -> None:
    token = choose(LOGITS, Sampling(temperature=3.0, seed=3, logprobs=2), 11)
    logprobs = torch.log_softmax(LOGITS.double(), 0)
    assert token.logprobs[0] == (token.token, logprobs[token.token].item())
    others = [index for index in (1, 3, 2, 0, 4) if index != token.token][:2]
    assert [index for index, _ in token.logprobs[1:]] == others
    assert choose(LOGITS, Sampling(), 0).logprobs == ()


def test_extreme_logits_choose_a_token() -> None:
    extreme = torch.full((1000,), -1e30)
    extreme[17] = 1e30
    assert choose(extreme, Sampling(temperature=1.0), 0).token == 17
    assert choose(torch.zeros(1000), Sampling(temperature=1e-3, top_p=0.5), 0).token < 501


def test_however_low_the_temperature_the_best_token_is_chosen() -> None:
    for temperature in (1e-3, 1e-30, 5e-324):
        assert {choose(LOGITS * 100, Sampling(temperature, seed=4), position).token for position in range(50)} == {1, 3}


def test_uniform_numbers_are_fixed_for_ever() -> None:
    """A request that moves to another machine goes on as it began."""
    assert uniform(0, 0) == 0.3859926107094097
    assert all(0 <= uniform(seed, position) < 1 for seed in (-1, 0, 2**63) for position in range(50))
