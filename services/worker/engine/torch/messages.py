"""What the engine's frontend and its rank processes say to each other, over one unix socket per rank.

A frame is a 4-byte length and a JSON object; `kind` tells the type. Tensors never travel here, only token ids and slots.
The frontend sends commands, each with a number `n`; the rank answers each with exactly one reply of the same `n`, except
`Decode`, which is answered by a stream of `Decoded` that ends with `last`, and `Begin`, whose answer comes after any number of
`Loading`. A rank handles its commands in order. A rank that cannot go on says `Failed` and ends.
"""

import socket
from asyncio import StreamReader
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from services.worker.engine.continuation import NO_PAST, Past
from services.worker.engine.protocol import EngineError, Sampling, Token
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.move_messages import (
    BeginMoving,
    Lend,
    Move,
    Moved,
    Moving,
    PoolHandle,
    Reach,
    Reachable,
    StopMove,
    Sum,
    Sums,
)
from shared.model.lattice import Group

FRAME_BYTES_MAX = 64 << 20
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Begin:
    """The first command. `context_tokens` bounds positions, `sequences` how many a decode rank has at a time. With `gpus` it is
    answered by `Allocated`, and a prefill rank is ready when it has answered the `Attach` that follows."""

    n: int
    rank: int
    prefill_ranks: int
    model_dir: str
    block_tokens: int
    blocks_per_rank: int
    context_tokens: int
    sequences: int
    gpus: int = 0
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class Attach:
    """The pools of all prefill ranks, in rank order, in GPU memory."""

    n: int
    pools: tuple[PoolHandle, ...]
    kind: Literal["attach"] = "attach"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Be ready to serve the epoch in this group. Nothing changes yet."""

    n: int
    epoch: int
    group: Group
    kind: Literal["prepare"] = "prepare"


@dataclass(frozen=True, slots=True)
class Commit:
    """Serve the prepared epoch. `Done.seconds` runs from `Prepare` to here."""

    n: int
    epoch: int
    kind: Literal["commit"] = "commit"


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget what was prepared, and go on with the epoch that is served."""

    n: int
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Part:
    """One request of a prefill step. `tokens` is the uncached suffix, as far as this step computes it; `slots` has one entry
    per block of the prompt up to there (see `kv_pool.Reservation`). `sampling` is None if no token is to be chosen yet.
    `moves_queries` says how the ranks attend to the reused blocks (see `movement`)."""

    tokens: tuple[int, ...]
    slots: tuple[SlotRef, ...]
    reused_blocks: int
    held_blocks: int
    sampling: Sampling | None
    moves_queries: bool
    past: Past = NO_PAST


@dataclass(frozen=True, slots=True)
class Prefill:
    """One step; every rank of the group gets the same."""

    n: int
    epoch: int
    parts: tuple[Part, ...]
    kind: Literal["prefill"] = "prefill"


@dataclass(frozen=True, slots=True)
class Decode:
    """Generate at most `new_tokens` tokens after `first_token`, ending after one of `stop_tokens`. The context of `sequence`
    has the KV of `prompt_tokens`."""

    n: int
    sequence: int
    prompt_tokens: int
    first_token: int
    new_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    past: Past = NO_PAST
    kind: Literal["decode"] = "decode"


@dataclass(frozen=True, slots=True)
class End:
    """Forget a sequence, whatever it is doing. `Done` says that nothing more is written to its context."""

    n: int
    sequence: int
    kind: Literal["end"] = "end"


Command = (
    BeginMoving
    | Move
    | StopMove
    | Lend
    | Reach
    | Sum
    | Begin
    | Attach
    | Prepare
    | Commit
    | Abort
    | Prefill
    | Decode
    | End
)


@dataclass(frozen=True, slots=True)
class Done:
    """The command is done; `seconds` is how long it took where that is of interest."""

    n: int
    seconds: float = 0.0
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Allocated:
    """A rank has its weights, its groups and its pool in GPU memory: slots, or a decode rank's contexts."""

    n: int
    pool: PoolHandle
    kind: Literal["allocated"] = "allocated"


@dataclass(frozen=True, slots=True)
class Loading:
    """Word of progress between `Begin` and its answer."""

    file: str
    read_bytes: int
    total_bytes: int
    kind: Literal["loading"] = "loading"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """This rank's share is computed and its blocks are written. The rank with a part's last position chose its first token:
    `tokens` has (number of the part, token) for those of this rank, None where its logits are no finite numbers."""

    n: int
    tokens: tuple[tuple[int, Token | None], ...]
    kind: Literal["prefilled"] = "prefilled"


@dataclass(frozen=True, slots=True)
class Decoded:
    """One token of a sequence; `last` ends the stream, as does None, where the logits are no finite numbers."""

    n: int
    token: Token | None
    last: bool
    kind: Literal["decoded"] = "decoded"


@dataclass(frozen=True, slots=True)
class Refused:
    """The command was not carried out and changed nothing."""

    n: int
    reason: str
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends."""

    reason: str
    kind: Literal["failed"] = "failed"


Reply = Moving | Reachable | Moved | Sums | Done | Allocated | Loading | Prefilled | Decoded | Refused | Failed

_message: TypeAdapter[Command | Reply] = TypeAdapter(Annotated[Command | Reply, Field(discriminator="kind")])


def frame(message: Command | Reply) -> bytes:
    """The message as it goes over the socket. EngineError above 64 MiB."""
    body = _message.dump_json(message)
    if len(body) > FRAME_BYTES_MAX:
        raise EngineError(f"{message.kind}: a message of {len(body)} bytes; at most {FRAME_BYTES_MAX}")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def receive(sock: socket.socket) -> Command | Reply | None:
    """The next message, on a rank. Blocks; None when the other side is gone."""
    header = _exactly(sock, _LENGTH_BYTES)
    body = None if header is None else _exactly(sock, int.from_bytes(header, "little"))
    return None if body is None else _message.validate_json(body)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        part = sock.recv(size - len(received))
        if not part:
            return None
        received += part
    return bytes(received)


async def read(reader: StreamReader) -> Command | Reply:
    """The next message, in the frontend. asyncio.IncompleteReadError when the rank is gone."""
    header = await reader.readexactly(_LENGTH_BYTES)
    return _message.validate_json(await reader.readexactly(int.from_bytes(header, "little")))
