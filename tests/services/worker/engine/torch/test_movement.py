"""The bytes of both variants by hand, and where the choice turns."""

import pytest

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.movement import key_bytes, moves_queries, query_bytes, suffix_bytes

LAYOUT = KvLayout("bfloat16", layers=2, kv_heads=2, head_dim=8, block_tokens=16, blocks=4)


def test_keys_are_the_prefix_that_lies_elsewhere() -> None:
    assert key_bytes(LAYOUT, 4, 64) == 48 * 2 * 2 * 8 * 2


def test_queries_are_there_and_back_with_padding() -> None:
    assert query_bytes(LAYOUT, 6, 4, 9) == 12 * 6 * (2 * 8 * 2 + 4)


def test_the_suffix_is_gathered_with_padding() -> None:
    assert suffix_bytes(LAYOUT, 4, 9) == 12 * 2 * 2 * 8 * 2
    assert suffix_bytes(LAYOUT, 4, 7) == suffix_bytes(LAYOUT, 1, 100) == 0


@pytest.mark.parametrize(
    ("prefix_tokens", "cost", "moved"), [(32, 1, False), (64, 1, True), (64, 4, False), (0, 0, False)]
)
def test_the_cheaper_one_moves(prefix_tokens: int, cost: float, moved: bool) -> None:
    """16 queries of 6 heads are 3,456 bytes and a token of the prefix is 64: they turn at 54 tokens."""
    assert moves_queries(LAYOUT, 6, 2, prefix_tokens, 16, cost) is moved


@pytest.mark.parametrize(("degree", "suffix_tokens"), [(1, 100), (2, 3), (8, 15)])
def test_nothing_moves_for_a_suffix_on_one_rank(degree: int, suffix_tokens: int) -> None:
    assert not moves_queries(LAYOUT, 6, degree, 4096, suffix_tokens, 0)
