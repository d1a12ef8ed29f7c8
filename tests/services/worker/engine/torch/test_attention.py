"""Attention in parts is attention over all keys, in float64 by the textbook."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from services.worker.engine.torch.attention import Partial, attend, attend_causally, merge

H, G, D = 6, 2, 16


def drawn(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(queries * 1000 + keys)

    def one(tokens: int, heads: int) -> Tensor:
        return (2 * torch.randn(tokens, heads, D, generator=chance)).to(dtype)

    return one(queries, H), one(keys, G), one(keys, G)


def textbook(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, closed_TS: Tensor) -> Partial:
    k_SHD, v_SHD = (x.double().repeat_interleave(H // G, dim=1) for x in (k_SGD, v_SGD))
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.double(), k_SHD) / D**0.5
    scores_HTS = scores_HTS.masked_fill(closed_TS, float("-inf"))
    out_THD = torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v_SHD)
    return Partial(out_THD, scores_HTS.logsumexp(-1).T)


def differences(found: Partial, exact: Partial) -> tuple[float, float]:
    return tuple(float((f.double() - e).abs().max()) for f, e in zip(found, exact, strict=True))  # type: ignore[return-value]


SHAPES = [(1, 1), (1, 700), (7, 7), (40, 57), (257, 257), (300, 1_024), (600, 601)]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_queries_at_the_end_see_what_came_before(queries: int, keys: int, dtype: torch.dtype, allowed: float) -> None:
    q, k, v = drawn(queries, keys, dtype)
    closed = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    found = attend_causally(q, k, v)
    assert found.out_THD.dtype == dtype
    assert found.lse_TH.dtype == torch.float32
    assert max(differences(found, textbook(q, k, v, closed))) <= allowed


@pytest.mark.parametrize("cuts", [(0, 0), (1, 64), (64, 64), (30, 90)])
def test_parts_may_be_cut_anywhere_and_be_empty(cuts: tuple[int, int]) -> None:
    """As the pools of ranks are: one may have every key of a prefix, and another none."""
    q, k, v = drawn(50, 90)
    ends = (0, *cuts, 90)
    parts = [attend(q, k[start:end], v[start:end]) for start, end in pairwise(ends)]
    for order in (parts, parts[::-1]):
        assert max(differences(merge(order), textbook(q, k, v, torch.zeros(50, 90, dtype=torch.bool)))) <= 1e-5


def test_the_causal_corner_is_square() -> None:
    with pytest.raises(AssertionError, match="3 queries are causal on as many keys, not on 5"):
        attend(*drawn(3, 5), causal=True)
