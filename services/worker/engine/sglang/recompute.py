"""Copies between SGLang workers: the destination computes the blocks anew. Nothing of a server's KV can be read from outside.

What the destination lacks for it are the tokens: an order names blocks, whose ids say nothing of them. So the source, which has
had a request with them, gives the tokens along with its promise (`Engine.pin`, in the bytes that tell how memory is read).
They go from agent to agent as prompts go from router to agent, and are in no event.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from services.worker.engine.copy_plan import CopyPlan, Pinned, Source
from services.worker.engine.protocol import EngineError, PrefillItem, Sampling
from services.worker.engine.sglang.cache_index import CacheIndex
from services.worker.engine.slot_ref import SlotRef
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, RequestId
from shared.model.blocks import Tokens

TAG = b"sglang-path-1"
"""What begins a path, so that memory of another kind of engine is not read as tokens."""

COUNT_BYTES = 4

PATH_BYTES_MAX = 256 * 1024
"""Of one promise: some 60,000 tokens in blocks of 64. The bus takes messages of 512 KiB, and a reply is base64."""


class Path:
    """Blocks from the root down, and their tokens."""

    def __init__(self, chain: tuple[BlockId, ...], raw: bytes) -> None:
        self.chain, self.raw = chain, raw

    @property
    def tokens(self) -> Tokens:
        return np.frombuffer(self.raw, "<u4").astype(np.uint32)

    def pack(self) -> bytes:
        """As `access` of a promise."""
        return TAG + len(self.chain).to_bytes(COUNT_BYTES, "little") + b"".join(self.chain) + self.raw

    @classmethod
    def unpack(cls, packed: bytes) -> "Path":
        """EngineError if these are no packed tokens."""
        if not packed.startswith(TAG):
            raise EngineError("access: the source is no SGLang engine, whose blocks can be computed from their tokens")
        at = len(TAG) + COUNT_BYTES
        count = int.from_bytes(packed[len(TAG) : at], "little")
        end = at + BLOCK_ID_BYTES * count
        raw = packed[end:]
        if not count or not raw or len(raw) % (4 * count):
            raise EngineError(f"access: {len(raw)} bytes of tokens for {count} blocks")
        chain = tuple(BlockId(packed[first : first + BLOCK_ID_BYTES]) for first in range(at, end, BLOCK_ID_BYTES))
        return cls(chain, raw)


def path_to(index: CacheIndex, block: BlockId) -> Path | None:
    """The path that ends with a block, if all of it has been named here."""
    named = index.path(block)
    return None if named is None else Path(tuple(name.block for name in named), b"".join(name.tokens for name in named))


def promise(index: CacheIndex, held: Mapping[BlockId, int], blocks: Sequence[BlockId]) -> Pinned:
    """What a node can tell the tokens of. `held` is a rank that holds each block. Nothing is pinned: who computes blocks anew
    does not need the source to keep them."""
    sources: list[Source | None] = []
    path: Path | None = None
    for block in blocks:
        found = path_to(index, block) if block in held else None
        if found is not None and len(found.pack()) > PATH_BYTES_MAX:
            found = None
        sources.append(None if found is None else Source(SlotRef(held[block], len(found.chain) - 1, 1)))
        path = found or path
    return Pinned(tuple(sources), b"" if path is None else path.pack())


def item_of(index: CacheIndex, plan: CopyPlan) -> PrefillItem:
    """The prefill that brings a plan's blocks. EngineError if nobody has told their tokens, with what each source gave instead:
    of another kind of engine, which knows none, nothing can be had."""
    last = plan.blocks[-1]
    path = path_to(index, last) or _told(plan)
    length = path.chain.index(last) + 1
    tokens = path.tokens[: length * (len(path.tokens) // len(path.chain))]
    return PrefillItem(RequestId(plan.operation), tokens, path.chain[:length], Sampling())


def _told(plan: CopyPlan) -> Path:
    """The path that a source has told, with the plan's last block on it."""
    gave: list[str] = []
    for node, access in plan.access.items():
        try:
            path = Path.unpack(access)
        except EngineError as error:
            gave.append(f"{node}: {error}")
            continue
        if plan.blocks[-1] in path.chain:
            return path
        gave.append(f"{node}: told another path")
    why = "; ".join(gave) or "there was none"
    raise EngineError(f"copy {plan.operation}: no source has told the tokens of its last block ({why})")
