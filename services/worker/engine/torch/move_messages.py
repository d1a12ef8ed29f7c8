"""What the engine's frontend and its mover say to each other, framed and answered as `messages` says."""

from dataclasses import dataclass
from typing import Literal

from services.worker.engine.copy_plan import CopyFailure
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """A rank's pool in GPU memory, as other processes of its node open it (see `kv_device`). Bytes are in hex."""

    device: int
    handle: str
    size_bytes: int
    offset_bytes: int
    counter: str
    counter_offset: int
    event: str
    waits: bool


@dataclass(frozen=True, slots=True)
class BeginMoving:
    """The first command of a mover, instead of `Begin`. `name` is unlike that of any other mover; KV of another `model` is
    refused. Its copies take `bytes_per_s` together. `pools` are those of all prefill ranks and `decode_pools` those of all
    decode ranks, if they are in GPU memory."""

    n: int
    name: str
    model: str
    prefill_ranks: int
    layout: KvLayout
    contexts: ContextLayout
    bytes_per_s: float
    pools: tuple[PoolHandle, ...] = ()
    decode_pools: tuple[PoolHandle, ...] = ()
    kind: Literal["begin-moving"] = "begin-moving"


@dataclass(frozen=True, slots=True)
class ContextRef:
    """Where a block of a prompt belongs in a sequence of a decode rank, which is counted from the first decode rank on."""

    decode_rank: int
    sequence: int
    depth: int


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block of a `Move`. `access` is the place in its `accesses` of the node that is read, None for the mover's own."""

    source: SlotRef
    to: SlotRef | ContextRef
    access: int | None
    checksum: int | None


@dataclass(frozen=True, slots=True)
class Move:
    """Copy blocks into slots of this node, or into one sequence, in order, for at most `limit_s`. Answered by `Moved`,
    whatever comes of it."""

    n: int
    blocks: tuple[BlockMove, ...]
    accesses: tuple[str, ...]
    limit_s: float
    kind: Literal["move"] = "move"


@dataclass(frozen=True, slots=True)
class StopMove:
    """Give up the move `of`; its own answer says how far it came. Unknown ones are ignored."""

    n: int
    of: int
    kind: Literal["stop-move"] = "stop-move"


@dataclass(frozen=True, slots=True)
class Lend:
    """Other nodes may read from this one until told otherwise, or no longer. Some transports need this side's help."""

    n: int
    on: bool
    kind: Literal["lend"] = "lend"


@dataclass(frozen=True, slots=True)
class Reach:
    """Be reachable for other nodes, if that is possible. Answered by `Reachable`. Movers that only copy at home are never
    asked: a transport takes half a second to set up."""

    n: int
    kind: Literal["reach"] = "reach"


@dataclass(frozen=True, slots=True)
class Sum:
    """Answered by `Sums`: the CRC-32 of each slot's content."""

    n: int
    slots: tuple[SlotRef, ...]
    kind: Literal["sum"] = "sum"


@dataclass(frozen=True, slots=True)
class Moving:
    """The mover is ready."""

    n: int
    kind: Literal["moving"] = "moving"


@dataclass(frozen=True, slots=True)
class Reachable:
    """`access` is how other movers reach this one; empty if they cannot, and then `detail` says why."""

    n: int
    access: str
    detail: str = ""
    kind: Literal["reachable"] = "reachable"


@dataclass(frozen=True, slots=True)
class Moved:
    """The first `blocks` of a move are in their slots. `abandoned`: something may still be written to the others, and the
    mover ends, so that it is not."""

    n: int
    blocks: int
    bytes: int
    seconds: float
    failure: CopyFailure | None = None
    detail: str = ""
    abandoned: bool = False
    kind: Literal["moved"] = "moved"


@dataclass(frozen=True, slots=True)
class Sums:
    """In the order of the slots that were named."""

    n: int
    checksums: tuple[int, ...]
    kind: Literal["sums"] = "sums"
