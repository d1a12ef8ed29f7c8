"""KV over NIXL: this node's pools registered for others to read, and one-sided reads of theirs. In the mover only.

NIXL picks the transport: within a machine the kernel copies between processes (CMA), across machines RDMA or TCP. Slots are in
host memory ("DRAM") or a GPU's ("VRAM"), generations always in the host's. Its progress thread is off: measured, it keeps a
core busy at rest, and the mover looks in often.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.kv_memory import Base, KvMemory

PEERS_MAX = 256
"""Nodes that are known at a time; the one that was read least recently is forgotten."""

NOT_INSTALLED = "nixl-cu12 is not installed: pip install --no-deps nixl-cu12"

Memory = Literal["DRAM", "VRAM"]


class Piece(NamedTuple):
    """Where something is to come, where it is, and how much it is."""

    here: Base
    there: Base
    bytes: int


class Unreachable(Exception):
    """The other node cannot be read, or is not one that we can use. `writing` if a read that has failed could not be called
    back: it may still write here. Otherwise nothing more will."""

    def __init__(self, detail: str, *, writing: bool = False) -> None:
        super().__init__(detail)
        self.writing = writing


@dataclass(frozen=True, slots=True)
class Access:
    """What another node needs to read this one: by rank, where generations and slots begin. `metadata` is NIXL's, as hex."""

    name: str
    model: str
    layout: KvLayout
    generations: tuple[int, ...]
    slots: tuple[Base, ...]
    memory: Memory
    """That the slots are in."""
    metadata: str


_ACCESS: TypeAdapter[Access] = TypeAdapter(Access)


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that can be read. `agent` is its name in NIXL."""

    agent: str
    access: Access


class Wire:
    """Without NIXL, or where it does not work, `access` is empty and nothing can be reached; `detail` says why."""

    def __init__(
        self, name: str, model: str, memory: KvMemory, contexts: Sequence[tuple[Base, int]], scratch: torch.Tensor
    ) -> None:
        """`contexts` are other memory of the kind that the slots are in, each with its bytes, and `scratch` is in host memory:
        reads may write to them as well."""
        self._model, self._layout = model, memory.layout
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._agent: Any = None
        self.access, self.detail = "", NOT_INSTALLED
        self.memory: Memory = "VRAM" if memory.on_gpus else "DRAM"
        try:
            from nixl_cu12 import _bindings as nixl
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ModuleNotFoundError:
            return
        except ImportError as error:
            self.detail = f"nixl-cu12 is installed and cannot be loaded: {error}"
            return
        self._errors = (
            nixl.nixlBackendError,
            nixl.nixlCancelledError,
            nixl.nixlInvalidParamError,
            nixl.nixlMismatchError,
            nixl.nixlNotFoundError,
            nixl.nixlRemoteDisconnectError,
            nixl.nixlUnknownError,
        )
        layout = memory.layout
        generations = [(base, layout.slots_offset, 0, "") for base in memory.generation_bases]
        slots = [(base.address, layout.slots_bytes, base.device, "") for base in memory.slot_bases]
        others = [(base.address, size, base.device, "") for base, size in contexts]
        ours = (scratch.data_ptr(), scratch.numel() * scratch.element_size(), 0, "")
        try:
            agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            agent.register_memory([*generations, ours], mem_type="DRAM")
            agent.register_memory([*slots, *others], mem_type=self.memory)
        except self._errors as error:
            self.detail = f"NIXL does not start here, or cannot register the pools as {self.memory}: {error}"
            return
        self._agent = agent
        metadata = agent.get_agent_metadata().hex()
        access = Access(name, model, layout, memory.generation_bases, memory.slot_bases, self.memory, metadata)
        self.access, self.detail = _ACCESS.dump_json(access).decode(), ""

    def progress(self) -> None:
        """Answer what others need from this side: a connection, and on some transports the bytes."""
        if self._agent is not None:
            self._agent.get_new_notifs()

    def peer(self, access: str) -> Peer:
        """The node that gave this `access`. Errors: Unreachable, also if its KV is of another model or layout."""
        if self._agent is None:
            raise Unreachable(self.detail)
        if access not in self._peers:
            self._peers[access] = self._connect(access)
            if len(self._peers) > PEERS_MAX:
                _, oldest = self._peers.popitem(last=False)
                self._agent.remove_remote_agent(oldest.agent)
        self._peers.move_to_end(access)
        return self._peers[access]

    def _connect(self, raw: str) -> Peer:
        try:
            access = _ACCESS.validate_json(raw)
            metadata = bytes.fromhex(access.metadata)
        except (ValidationError, ValueError) as error:
            raise Unreachable(f"access: not of a torch engine ({error})") from error
        if (access.model, self._comparable(access.layout)) != (self._model, self._comparable(self._layout)):
            raise Unreachable(f"access: {access.name} keeps KV of {access.model} as {access.layout}")
        try:
            agent = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise Unreachable(f"{access.name}: {error}") from error
        return Peer(agent.decode() if isinstance(agent, bytes) else agent, access)

    @staticmethod
    def _comparable(layout: KvLayout) -> tuple[object, ...]:
        """Everything that a slot's content depends on; how many slots there are is each node's own affair."""
        return layout.dtype, layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens

    def read(self, peer: Peer, pieces: Sequence[Piece], here: Memory = "DRAM", there: Memory = "DRAM") -> Any:
        """Begin a read from their kind of memory to ours; ask `done` about it. Errors: Unreachable."""
        to = [(piece.here.address, piece.bytes, piece.here.device) for piece in pieces]
        source = [(piece.there.address, piece.bytes, piece.there.device) for piece in pieces]
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(to, mem_type=here),
                self._agent.get_xfer_descs(source, mem_type=there),
                peer.agent,
            )
            state = self._agent.transfer(handle)
        except self._errors as error:
            raise self._failed(peer, handle, str(error)) from error
        if state == "ERR":
            raise self._failed(peer, handle, "the read failed")
        return handle

    def done(self, peer: Peer, handle: Any) -> bool:
        """Whether everything is here. Errors: Unreachable."""
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            raise self._failed(peer, handle, str(error)) from error
        if state == "ERR":
            raise self._failed(peer, handle, "the read failed")
        if state != "DONE":
            return False
        self._agent.release_xfer_handle(handle)
        return True

    def _failed(self, peer: Peer, handle: Any, why: str) -> Unreachable:
        """One piece of a read has failed, and others may be on their way: what is released is called back. The next read
        connects anew, if its access is a new one."""
        writing = False
        if handle is not None:
            try:
                self._agent.release_xfer_handle(handle)
            except self._errors as error:
                writing, why = True, f"{why}, and could not be called back: {error}"
        for access in [access for access, known in self._peers.items() if known is peer]:
            del self._peers[access]
            self._agent.remove_remote_agent(peer.agent)
        return Unreachable(f"{peer.access.name}: {why}", writing=writing)
