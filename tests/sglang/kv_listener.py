"""A naive listener to SGLang's KV events: what a unit's tree holds, as far as its events say."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from services.worker.engine.sglang.plugin.paths import NOWHERE, block_hash, path_of


class Listener:
    """One unit's stream. `blocks` maps each block to its parent, None for the first of a path; `removed` counts blocks that
    went one by one."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, events: Mapping[str, Any], unit: int
    ) -> None:
        """`events` is what `/server_info` says of them. What was sent before is replayed."""
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://{host}:{events['endpoint_port_base'] + unit}")
        self._next = 0
        self.blocks: dict[int, int | None] = {}
        self.cleared = self.removed = 0
        self._replay(context, f"tcp://{host}:{events['replay_endpoint_port_base'] + unit}")

    def drain(self, quiet_ms: int = 2000) -> None:
        """Take everything that comes until nothing has for a while."""
        while self._socket.poll(quiet_ms):
            _, sequence, payload = self._socket.recv_multipart()
            self._take(int.from_bytes(sequence, "big"), payload)

    def held(self, tokens: Sequence[int], page: int) -> int:
        """How many of the prompt's leading tokens the unit holds."""

        blocks = 0
        for digest in path_of(NOWHERE, array("I", tokens), page).digests:
            if block_hash(digest) not in self.blocks:
                break
            blocks += 1
        return blocks * page

    def _replay(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        with context.socket(zmq.DEALER) as asking:
            asking.connect(endpoint)
            asking.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                *_, sequence, payload = asking.recv_multipart()
                if int.from_bytes(sequence, "big", signed=True) < 0:
                    return
                self._take(int.from_bytes(sequence, "big"), payload)

    def _take(self, sequence: int, payload: bytes) -> None:
        if sequence < self._next:
            return  # replayed already
        assert sequence == self._next, "no event is lost on one machine"
        self._next += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            self._apply(event)

    def _apply(self, event: dict[str, object]) -> None:
        match event:
            case {"type": "AllBlocksCleared"}:
                self.blocks.clear()
                self.cleared += 1
            case {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent}:
                for each in hashes:
                    assert parent is None or parent in self.blocks, "parents come first"
                    self.blocks[each] = parent
                    parent = each
            case {"type": "BlockRemoved", "block_hashes": list(hashes)}:
                self.removed += len(hashes)
                for each in hashes:
                    del self.blocks[each]
            case _:
                raise AssertionError(event)

    def close(self) -> None:
        self._socket.close(linger=0)
