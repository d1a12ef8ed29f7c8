"""A naive listener to SGLang's KV events: what a unit's tree holds, as far as its events say."""

from array import array
from collections.abc import Sequence
from itertools import count

import msgspec
import zmq

from services.worker.engine.sglang.plugin.paths import NOWHERE, block_hash, path_of


class Listener:
    """One unit's stream. `blocks` maps each block to its parent, None for the first of a path."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._expected = count()
        self.blocks: dict[int, int | None] = {}
        self.cleared = 0

    def drain(self, quiet_ms: int = 2000) -> None:
        """Take everything that comes until nothing has for a while."""
        while self._socket.poll(quiet_ms):
            _, sequence, payload = self._socket.recv_multipart()
            assert int.from_bytes(sequence, "big") == next(self._expected), "no event is lost on one machine"
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    def held(self, tokens: Sequence[int], page: int) -> int:
        """How many of the prompt's leading tokens the unit holds."""

        blocks = 0
        for digest in path_of(NOWHERE, array("I", tokens), page).digests:
            if block_hash(digest) not in self.blocks:
                break
            blocks += 1
        return blocks * page

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
                for each in hashes:
                    del self.blocks[each]
            case _:
                raise AssertionError(event)

    def close(self) -> None:
        self._socket.close(linger=0)
