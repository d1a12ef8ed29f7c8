"""SGLang's own names for pages of KV, as its KV events carry them (0.5.23, `mem_cache/utils.py`).

A page's digest is SHA-256 of the digest before it and its tokens as u32 little-endian; an event names it by the first eight
bytes, big-endian and signed. The chain of a request with a cache salt begins with a digest of the salt, so equal tokens under
two salts have different names, as the pages themselves are different pages.
"""

from array import array
from collections.abc import Sequence

from services.worker.engine.sglang.plugin.paths import block_hash, path_of
from shared.contracts.ids import BlockId, RequestId
from shared.model.blocks import Tokens

PageHash = int
"""A signed 64-bit integer."""


def salt_of(request: RequestId, chain: Sequence[BlockId]) -> str:
    """What keeps tenants apart inside one server: the prompt's first block id, which is a keyed hash of tenant and tokens.

    Two prompts share a prefix of whole blocks if and only if they share the first block, so nothing that may be shared is
    kept apart; and of equal prompts of two tenants neither finds the other's pages. A prompt without a whole block has its
    own request instead: SGLang also keeps pages that are filled up by generated tokens, and nobody else is to find those.
    """
    return chain[0].hex() if chain else f"request {request}"


def page_hashes(tokens: Tokens, page_tokens: int, salt: str | None) -> list[PageHash]:
    """The names of the prompt's whole pages, first page first."""
    path = path_of((None, salt), array("I", tokens.astype("<u4", copy=False).tobytes()), page_tokens)
    return [block_hash(digest) for digest in path.digests]
