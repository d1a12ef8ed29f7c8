"""A folded state next to the log: what a start goes on from, in place of everything the log still has.

A snapshot is bytes, in pieces of a message each, and a record that says of which log and place they are, by which code, how
many and with which digest. The pieces lie in one of two slots. A new snapshot is written to the other one, and then the record
names that: so one that was broken off replaces nothing, and no more than two are ever kept. Where two processes write at once
one record holds, and the digest tells whether its pieces do.

Whoever reads believes nothing that does not fit: without a snapshot a start folds the log, which takes longer.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.runtime.ports import Cell

FORMAT = 1

PIECE_BYTES = 2**19
"""Half of what a server takes in one message."""

SNAPSHOT_BYTES_MAX = 480 * 2**20
"""Two of them, and what a server adds to each piece, fit the bucket (`nats_cell.SNAPSHOTS`)."""

SLOTS = 2

CellOf = Callable[[str], Cell]
"""The record under a key of the bucket."""


class BadSnapshot(ValueError):
    """It is not what its record says, or of no use here. The message says why; the log has everything."""


class TooLarge(ValueError):
    """The state does not fit. What was kept before still is."""


class About(NamedTuple):
    """`seen_seq` events of the log `log` are folded in it, by the code whose digest is `code`."""

    log: str
    seen_seq: int
    code: str


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)

    format: int
    log: str
    seen_seq: int = Field(ge=0)
    code: str
    slot: int = Field(ge=0, lt=SLOTS)
    size_bytes: int = Field(ge=0, le=SNAPSHOT_BYTES_MAX)
    digest: str

    @property
    def about(self) -> About:
        return About(self.log, self.seen_seq, self.code)


class Snapshots:
    """Those of one role."""

    def __init__(self, cell_of: CellOf, role: str) -> None:
        self._cell_of = cell_of
        self._role = role

    async def write(self, about: About, pieces: AsyncIterable[bytes]) -> int:
        """Keep a new one in place of the last; returns its bytes. `pieces` are of any length.

        Errors: Unavailable; WrongLastSequence if another process has kept one meanwhile; TooLarge; what `pieces` raise.
        """
        record = self._cell_of(self._role)
        found = await record.read()
        slot = 1 - last.slot if found and (last := _record(found[1])) else 0
        digest, size_bytes, number = sha256(), 0, 0
        async for piece in _of_equal_length(pieces):
            digest.update(piece)
            size_bytes += len(piece)
            if size_bytes > SNAPSHOT_BYTES_MAX:
                raise TooLarge(f"a snapshot has at most {SNAPSHOT_BYTES_MAX} bytes, and this one has more")
            await _replace(self._piece(slot, number), piece)
            number += 1
        told = _Record(
            format=FORMAT, **about._asdict(), slot=slot, size_bytes=size_bytes, digest=digest.hexdigest()
        ).model_dump_json()
        await record.write(told.encode(), found[0] if found else 0)
        return size_bytes

    async def read(self, fits: Callable[[About], str | None]) -> bytes | None:
        """The last one; None before the first. `fits` says why one is of no use, before it is read.

        Errors: BadSnapshot; Unavailable.
        """
        found = await self._cell_of(self._role).read()
        if found is None:
            return None
        if (record := _record(found[1])) is None:
            raise BadSnapshot("its record cannot be read, or is of another version")
        if (reason := fits(record.about)) is not None:
            raise BadSnapshot(reason)
        whole = bytearray()
        for number in range(-(-record.size_bytes // PIECE_BYTES)):
            piece = await self._piece(record.slot, number).read()
            whole += piece[1] if piece else b""
        if len(whole) != record.size_bytes or sha256(whole).hexdigest() != record.digest:
            raise BadSnapshot("its pieces are not those that were written")
        return bytes(whole)

    def _piece(self, slot: int, number: int) -> Cell:
        return self._cell_of(f"{self._role}.{slot}.{number}")


@lru_cache
def code_of(*packages: str) -> str:
    """A digest of the source of these packages: a state that other code has folded is not what this one would have."""
    digest = sha256()
    for package in packages:
        for path, source in _sources(package, files(package)):
            digest.update(f"{path} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _sources(path: str, folder: Traversable) -> list[tuple[str, bytes]]:
    found = []
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            found += _sources(f"{path}/{each.name}", each)
        elif each.name.endswith(".py"):
            found.append((f"{path}/{each.name}", each.read_bytes()))
    return found


def _record(raw: bytes) -> _Record | None:
    """None for what this version did not write."""
    try:
        record = _Record.model_validate_json(raw)
    except ValidationError:
        return None
    return record if record.format == FORMAT else None


async def _replace(cell: Cell, value: bytes) -> None:
    found = await cell.read()
    await cell.write(value, found[0] if found else 0)


async def _of_equal_length(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of `PIECE_BYTES`, the last one shorter."""
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        while len(waiting) >= PIECE_BYTES:
            yield bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
    if waiting:
        yield bytes(waiting)
