"""Block ids: a prompt's tokens as a chain of keyed hashes, so that equal prefixes have equal ids and nothing else has.

id = BLAKE2b-128(key = deployment key ‖ tenant group salt; parent id ‖ tokens as u32 little-endian). Only whole blocks have
ids. The key keeps a reader of the event log from testing guesses of a prompt; the salt keeps one tenant group from
probing another's cache (`docs/adr`).
"""

from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shared.contracts.ids import BLOCK_ID_BYTES, BlockId
from shared.contracts.ids import BLOCK_TOKENS_MAX as BLOCK_TOKENS_MAX
from shared.contracts.ids import BLOCK_TOKENS_MIN as BLOCK_TOKENS_MIN

Tokens = npt.NDArray[np.uint32]
"""Shape (prompt_tokens,), token ids."""


def block_key(deployment_key: bytes, tenant_group: str) -> bytes:
    """The 32-byte hash key of one tenant group in one deployment."""
    return blake2b(tenant_group.encode(), key=deployment_key[:64], digest_size=32).digest()


def block_chain(tokens: Tokens, block_tokens: int, key: bytes) -> list[BlockId]:
    """The ids of the prompt's whole blocks, first block first; len = prompt_tokens // block_tokens.

    Errors: ValueError if `block_tokens` is outside [4, 512]. Cost: about 0.7 µs per block of 64 tokens.
    """
    if not BLOCK_TOKENS_MIN <= block_tokens <= BLOCK_TOKENS_MAX:
        raise ValueError(f"block_tokens: {block_tokens} is outside [{BLOCK_TOKENS_MIN}, {BLOCK_TOKENS_MAX}]")
    raw = tokens.astype("<u4", copy=False).tobytes()
    keyed = blake2b(
        key=key, digest_size=BLOCK_ID_BYTES
    )  # copied per block: naming key and size each time costs a third more
    chain: list[BlockId] = []
    parent = b""
    for start, end in pairwise(range(0, len(raw) + 1, 4 * block_tokens)):
        block = keyed.copy()
        block.update(parent + raw[start:end])
        parent = block.digest()
        chain.append(BlockId(parent))
    return chain


def reusable_tokens(blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """P for a match of `blocks` blocks: at least one token of a prompt is always computed, and only whole blocks count."""
    return min(blocks, (prompt_tokens - 1) // block_tokens) * block_tokens
