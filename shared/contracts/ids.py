"""The names things have on the wire. Each is a type, so a node id never passes for a worker id.

Ids are NATS subject tokens where they appear in a subject: letters, digits, `-` and `_`, at most 64 characters, and those of
processes, which are made of several, at most 200. Events and commands are held to the forms here when they are read: a fold
takes names apart and must not fail over one.
"""

import re
from hashlib import blake2b
from struct import Struct
from typing import Annotated, NewType

from pydantic import AfterValidator, StringConstraints

_NAME = "[A-Za-z0-9_-]{1,64}"
_PROCESS = "^[A-Za-z0-9_-]{1,200}$"
_WORKER = f"^{_NAME}/([0-9]{{1,18}}|decode)/[0-9]{{1,4}}$"

RequestId = NewType("RequestId", Annotated[str, StringConstraints(pattern=f"^{_NAME}$")])
NodeId = NewType("NodeId", Annotated[str, StringConstraints(pattern=f"^{_NAME}$")])
RouterId = NewType("RouterId", Annotated[str, StringConstraints(pattern=_PROCESS)])
TenantId = NewType("TenantId", Annotated[str, StringConstraints(min_length=1, max_length=64)])
Source = NewType("Source", Annotated[str, StringConstraints(pattern=_PROCESS)])
"""One process of one service. A restarted process is a new source."""

WorkerId = NewType("WorkerId", Annotated[str, StringConstraints(pattern=_WORKER)])
"""`<node>/<epoch>/<first rank>`: a worker exists in one epoch of one node only. `<node>/decode/<rank>` is a decode rank."""

BlockId = NewType("BlockId", bytes)
"""16 bytes, see `shared.model.blocks`."""

BLOCK_ID_BYTES = 16
BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX = 4, 512


def check_token(name: str, value: str) -> str:
    """`value`, if it may stand in a NATS subject; ValueError names the field otherwise."""
    if not re.fullmatch(_NAME, value):
        raise ValueError(f"{name}: {value!r} must be 1-64 letters, digits, '-' or '_'")
    return value


def worker_id(node: NodeId, epoch: int, first_rank: int) -> WorkerId:
    """The id of the worker that starts at `first_rank` in `epoch` of `node`."""
    return WorkerId(f"{node}/{epoch}/{first_rank}")


def decode_worker_id(node: NodeId, rank: int) -> WorkerId:
    """The id of a decode rank: `<node>/decode/<rank>`. Decode ranks have no epoch; they never change degree."""
    return WorkerId(f"{node}/decode/{rank}")


def decode_rank_of(worker: WorkerId) -> int:
    """The decode rank of `decode_worker_id`."""
    return int(worker.rsplit("/", 1)[1])


def node_of(worker: WorkerId) -> NodeId:
    """The node a worker lives on."""
    return NodeId(worker.split("/", 1)[0])


def epoch_of(worker: WorkerId) -> int:
    """The node epoch a worker belongs to."""
    return int(worker.split("/", 2)[1])


def client_digest(client_id: str) -> str:
    """What the record keeps of an id that a client made up: enough to find it by, whatever was put into it."""
    return blake2b(client_id.encode(), digest_size=16).hexdigest()


_ONE_BLOCK_ID = Struct(f"{BLOCK_ID_BYTES}s")


def _whole(packed: bytes) -> bytes:
    if len(packed) % BLOCK_ID_BYTES:
        raise ValueError(f"block_ids: {len(packed)} bytes is not a multiple of {BLOCK_ID_BYTES}")
    return packed


PackedBlockIds = Annotated[bytes, AfterValidator(_whole)]
"""Block ids, 16 bytes each. An event whose ids are not whole is refused when it is read: no fold could take it."""


def unpack_block_ids(packed: bytes) -> list[BlockId]:
    """Block ids out of their packed form. ValueError on a length that is no multiple of 16."""
    return [block for (block,) in _ONE_BLOCK_ID.iter_unpack(_whole(packed))]
