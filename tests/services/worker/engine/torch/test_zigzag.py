"""The partition of a suffix: everything exactly once, balanced, and put back in order."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.torch.zigzag import holder_of, runs_alone, share, shares
from shared.model.cost import attended_pairs
from shared.model.lattice import DEGREES

degrees = st.sampled_from(DEGREES)


@given(st.integers(1, 5000), degrees)
def test_every_token_is_computed_once(tokens: int, degree: int) -> None:
    spans = [span for index in range(degree) for span in share(tokens, degree, index).spans]
    assert sorted(token for start, end in spans for token in range(start, end)) == list(range(tokens))
    assert sum(share(tokens, degree, index).last_token == tokens - 1 for index in range(degree)) == 1


@given(st.integers(1, 5000), degrees)
def test_chunks_come_back_in_order(tokens: int, degree: int) -> None:
    chunk = share(tokens, degree, 0).chunk_tokens
    assert 0 <= 2 * degree * chunk - tokens < 2 * degree
    for number in range(2 * degree):
        index, half = holder_of(number, degree)
        start, end = share(tokens, degree, index).spans[half]
        assert (start, end) == (min(number * chunk, tokens), min((number + 1) * chunk, tokens))


@given(st.integers(512, 5000), st.integers(0, 5000), degrees)
def test_ranks_attend_to_about_equally_many_pairs(tokens: int, cached: int, degree: int) -> None:
    def pairs(index: int) -> int:
        spans = share(tokens, degree, index).spans
        return sum(attended_pairs(end - start, cached + start) for start, end in spans)

    work = [pairs(index) for index in range(degree)]
    assert max(work) <= 1.1 * attended_pairs(tokens, cached) / degree


def test_the_last_chunk_may_be_empty() -> None:
    cut = share(17, 8, 0)
    assert (cut.chunk_tokens, cut.spans, cut.tokens, cut.last_token) == (2, ((0, 2), (17, 17)), 2, 1)
    assert share(1, 1, 0).spans == ((0, 1), (1, 1))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), degrees)
def test_a_packed_step_computes_every_token_once(suffixes: list[int], degree: int) -> None:
    ranks = [shares(suffixes, degree, index) for index in range(degree)]
    for number, tokens in enumerate(suffixes):
        cuts = [rank[number] for rank in ranks]
        computed = [token for cut in cuts for start, end in cut.spans for token in range(start, end)]
        assert sorted(computed) == list(range(tokens))
        if runs_alone(tokens, degree):
            assert sorted(cut.tokens for cut in cuts) == [0] * (degree - 1) + [tokens]
        else:
            assert cuts == [share(tokens, degree, index) for index in range(degree)], "as if it were by itself"
            assert all(cut.tokens for cut in cuts), "a collective needs every rank"
    lone = [sum(cut.tokens > 0 for cut in rank if cut.alone) for rank in ranks]
    assert max(lone) - min(lone) <= 1


def test_short_suffixes_run_alone() -> None:
    assert runs_alone(15, 8)
    assert not runs_alone(16, 8)
    assert runs_alone(5000, 1)
