"""A copy as data: which blocks are to come, and where each of them is read. One primitive for all movement of KV.

Replication, reconciliation after a switch and the fetch of a prefix differ in who asks and in the sources, in nothing else; a
hand-off goes to a sequence that is to be decoded instead of a worker, by the same reads under the same bounds.
A plan says what lies where at the source, never where it goes: the destination places blocks by its own degree, so a copy
from a worker of another degree converts the layout without knowing that it does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.worker.engine.slot_ref import SlotRef
from shared.contracts.copy_commands import COPY_BLOCKS_MAX, HAND_OFF_BLOCKS_MAX
from shared.contracts.ids import BlockId, NodeId
from shared.model.lattice import Group

CopyFailure = Literal["stale-source", "bad-checksum", "source-lost", "time-limit", "stale-epoch", "cancelled"]
"""Why a copy ended early: the source has other content in the slot · what came differs from what was sent · the source
cannot be reached · the plan's limit · the geometry changed on the way · somebody called it off."""


@dataclass(frozen=True, slots=True)
class Source:
    """One copy of one block. `node` is None for a slot of the destination's own node. `checksum` is the CRC-32 of the
    block's bytes, if the source has given one."""

    slot: SlotRef
    node: NodeId | None = None
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Bring `blocks`, a path below `parent` (None for the root), to the worker `group` of `epoch`.

    `sources` has one entry per block; they may lie on several nodes, ranks and degrees. `access` tells how each foreign
    node's memory is reached, as its own `Engine.pin` said. The destination must hold the parent: a plan for a worker that
    lacks it begins further up. Blocks that it holds by then are not copied again.

    ValueError names the field and its limit.
    """

    operation: str
    epoch: int
    group: Group
    parent: BlockId | None
    blocks: tuple[BlockId, ...]
    sources: tuple[Source, ...]
    limit_s: float
    access: Mapping[NodeId, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= len(self.blocks) <= COPY_BLOCKS_MAX:
            raise ValueError(f"blocks: {len(self.blocks)}; a plan has 1 to {COPY_BLOCKS_MAX}")
        if len(self.sources) != len(self.blocks):
            raise ValueError(f"sources: {len(self.sources)} for {len(self.blocks)} blocks")
        if len(set(self.blocks)) < len(self.blocks):
            raise ValueError(
                f"blocks: {len(self.blocks)}, of them {len(set(self.blocks))} different; a path has each once"
            )
        _check(self.sources, self.access, self.limit_s)


@dataclass(frozen=True, slots=True)
class HandOffPlan:
    """Bring the KV of a prompt, whose prefill has finished, to a decode rank of this node. `sources` has an entry for each of
    the prompt's blocks, the partial last one included, as `Engine.offer` gave them where the prefill ran; the rest is as in
    `CopyPlan`. ValueError names the field and its limit."""

    prompt_tokens: int
    sources: tuple[Source, ...]
    limit_s: float
    access: Mapping[NodeId, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= HAND_OFF_BLOCKS_MAX:
            raise ValueError(f"sources: {len(self.sources)}; a prompt has 1 to {HAND_OFF_BLOCKS_MAX}")
        _check(self.sources, self.access, self.limit_s)


def _check(sources: tuple[Source, ...], access: Mapping[NodeId, bytes], limit_s: float) -> None:
    if limit_s <= 0:
        raise ValueError(f"limit_s: {limit_s:g} must be above 0")
    if any(source.slot.generation < 1 for source in sources):
        raise ValueError("sources: a slot of generation 0 has nothing yet; contents are counted from 1")
    if unknown := {source.node for source in sources if source.node} - access.keys():
        raise ValueError(f"access: nothing is said of {sorted(unknown)}")


@dataclass(frozen=True, slots=True)
class Copied:
    """What came of a plan. `blocks`, a path below `parent`, became the worker's: all that were missing, or, after a
    `failure`, those before the block at which it happened. `evicted` left the worker to make room, before anything came."""

    parent: BlockId | None
    blocks: tuple[BlockId, ...]
    first_depth: int
    bytes: int
    seconds: float
    evicted: tuple[BlockId, ...] = ()
    failure: CopyFailure | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a source lends. `sources` has an entry per block that was asked for, None for one that is not on the node.
    `access` is how another node reads them; empty if none can."""

    sources: tuple[Source | None, ...]
    access: bytes = b""


KeptReason = Literal["not-held", "pinned", "has-descendants"]


@dataclass(frozen=True, slots=True)
class Evicted:
    """`freed` left the worker, children before parents; everything else that was named stayed, for the reason given.
    `evicted` had left it before to make room, and nobody has been told yet."""

    freed: tuple[BlockId, ...]
    kept: tuple[tuple[BlockId, KeptReason], ...]
    evicted: tuple[BlockId, ...] = ()
