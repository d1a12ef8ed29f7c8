"""Prompts as chains of keyed hashes."""

import struct
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.blocks import block_chain, block_key, reusable_tokens

KEY = block_key(b"deployment secret", "tenants")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def chain(tokens: list[int], block_tokens: int = 4, key: bytes = KEY) -> list[bytes]:
    return list(block_chain(np.array(tokens, dtype=np.uint32), block_tokens, key))


def test_a_chain_by_hand() -> None:
    first = blake2b(struct.pack("<4I", 1, 2, 3, 4), key=KEY, digest_size=16).digest()
    second = blake2b(first + struct.pack("<4I", 5, 6, 7, 2**32 - 1), key=KEY, digest_size=16).digest()
    assert chain([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9]) == [first, second]


def test_a_key_by_hand() -> None:
    """The salt is hashed under the deployment's key, of which BLAKE2 takes at most 64 bytes."""
    assert block_key(b"k" * 100, "a") == blake2b(b"a", key=b"k" * 64, digest_size=32).digest()


@given(TOKENS, st.integers(4, 20))
def test_a_chain_has_the_prompts_whole_blocks(tokens: list[int], block_tokens: int) -> None:
    assert len(chain(tokens, block_tokens)) == len(tokens) // block_tokens


@given(TOKENS, TOKENS, TOKENS)
def test_equal_prefixes_have_equal_ids_and_nothing_else_has(
    prefix: list[int], one: list[int], other: list[int]
) -> None:
    first, second = prefix + one, prefix + other
    shared_tokens = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    same = [a == b for a, b in zip(chain(first), chain(second), strict=False)]
    assert same == [(i + 1) * 4 <= shared_tokens for i in range(len(same))]


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=12))
def test_another_key_or_tenant_group_has_other_ids(tokens: list[int]) -> None:
    for key in (block_key(b"deployment secret", "others"), block_key(b"another secret", "tenants")):
        assert not set(chain(tokens)) & set(chain(tokens, key=key))


@given(TOKENS)
def test_the_width_of_the_array_does_not_matter(tokens: list[int]) -> None:
    wide = np.array(tokens, dtype=np.int64)
    assert list(block_chain(wide, 4, KEY)) == chain(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [0, 3, 513])
def test_a_block_size_out_of_range_is_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"block_tokens: {block_tokens} is outside \[4, 512\]"):
        chain([1, 2, 3, 4], block_tokens)


@pytest.mark.parametrize(
    ("blocks", "prompt_tokens", "reusable"),
    [
        (0, 100, 0),
        (1, 100, 64),
        (2, 100, 64),
        (1, 65, 64),
        (1, 64, 0),
        (2, 128, 64),
        (2, 129, 128),
        (5, 1, 0),
        (3, 10_000, 192),
    ],
)
def test_reusable_tokens_by_hand(blocks: int, prompt_tokens: int, reusable: int) -> None:

    assert reusable_tokens(blocks, 64, prompt_tokens) == reusable


@given(st.integers(0, 50), st.integers(4, 512), st.integers(1, 10_000))
def test_at_least_one_token_is_computed(blocks: int, block_tokens: int, prompt_tokens: int) -> None:
    tokens = reusable_tokens(blocks, block_tokens, prompt_tokens)
    assert 0 <= tokens <= prompt_tokens - 1
    assert tokens % block_tokens == 0
    assert tokens == blocks * block_tokens or tokens + block_tokens > prompt_tokens - 1
