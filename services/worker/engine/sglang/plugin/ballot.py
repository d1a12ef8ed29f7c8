"""One decision by all touched ranks, through a key-value store, that any of them may be too late for.

    vote     every voter writes yes, with what its mates need to know, or no
    decide   who has seen every yes proposes `commit`; who has seen a no, or waited long enough, `abort`. The first proposal
             to be written is the decision, for a rank that was stopped and wakes much later too
    done     said by everybody who had to read; the last one takes the epoch's keys away

No collective: one that timed out would leave its process group unusable, and a wait for a key leaves nothing.
"""

import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Protocol

WAIT_S_MIN = 0.05
"""A wait that has run out still looks once."""


class Store(Protocol):
    """What is used of `torch.distributed.TCPStore`."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """`RuntimeError` when the time is up."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Writes `desired` if the key holds `expected` (empty: is not there); what it holds then."""

    def add(self, key: str, amount: int, /) -> int: ...

    def delete_key(self, key: str, /) -> bool: ...


class Decision(StrEnum):
    """What everybody does."""

    COMMIT = "commit"
    ABORT = "abort"


class Ballot:
    """One epoch, as one reader sees it. Voters are ranks of the server; the controller reads and does not vote."""

    def __init__(
        self, store: Store, epoch: int, voters: Sequence[int], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._base = f"vertumnus/{epoch}/"
        self._voters = tuple(voters)
        self._now = now

    def vote(self, rank: int, offer: Sequence[bytes] | None) -> None:
        """Yes, with the offer, or no (None)."""
        self._store.set(self._vote_of(rank), b"n" if offer is None else b"y" + pack(offer))

    def votes(self, limit_s: float) -> dict[int, list[bytes]] | None:
        """Every voter's offer, or None: somebody voted no, or not all voted within the limit."""
        deadline = self._now() + limit_s
        offers = {}
        for rank in self._voters:
            try:
                self._store.wait([self._vote_of(rank)], timedelta(seconds=max(WAIT_S_MIN, deadline - self._now())))
            except RuntimeError:
                return None
            vote = self._store.get(self._vote_of(rank))
            if vote[:1] != b"y":
                return None
            offers[rank] = unpack(vote[1:])
        return offers

    def decide(self, proposal: Decision) -> Decision:
        """The decision, which is the proposal if nobody came first."""
        return Decision(self._store.compare_set(self._base + "decision", "", proposal).decode())

    def done(self) -> None:
        """This reader needs the epoch's keys no more. To be called once by every voter and once by the controller."""
        readers = self._store.add(self._base + "done", 1)
        if readers == len(self._voters) + 1:
            for key in (*map(self._vote_of, self._voters), self._base + "decision", self._base + "done"):
                self._store.delete_key(key)

    def _vote_of(self, rank: int) -> str:
        return f"{self._base}vote/{rank}"


def pack(parts: Sequence[bytes]) -> bytes:
    """Byte strings as one: the length of each, and then each."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def unpack(packed: bytes) -> list[bytes]:
    """The inverse of `pack`."""
    parts, at = [], 0
    while at < len(packed):
        (length,) = struct.unpack_from("<I", packed, at)
        parts.append(packed[at + 4 : at + 4 + length])
        at += 4 + length
    return parts
