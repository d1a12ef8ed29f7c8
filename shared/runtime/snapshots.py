"""A folded state next to the log: what a start goes on from, in place of everything the log still has.

A snapshot is bytes, in pieces of a message each, and a record that says of which log and place they are, by which code, how
many and with which digest. The pieces lie in one of two slots. A new snapshot is written to the other one, and then the record
names that: so one that was broken off replaces nothing, and no more than two are ever kept.

Of two processes that write at once, the one that began last goes on. Who begins claims: it writes the record again, as it was.
Before each piece a writer looks whether the record is still its own, and between the look and the write nobody may have changed
the piece. So one that was overtaken writes nothing over what the other has written, and cannot replace the record.

Whoever reads believes nothing that does not fit: without a snapshot a start folds the log, which takes longer.
"""

import struct
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.runtime.ports import Cell, WrongLastSequence

FORMAT = 2

LENGTH = struct.Struct("<Q")
"""What announced pieces begin with: how many bytes follow."""

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


class _Last(BaseModel):
    """The snapshot that holds."""

    model_config = ConfigDict(frozen=True)

    log: str
    seen_seq: int = Field(ge=0)
    code: str
    slot: int = Field(ge=0, lt=SLOTS)
    size_bytes: int = Field(ge=0, le=SNAPSHOT_BYTES_MAX)
    digest: str

    @property
    def about(self) -> About:
        return About(self.log, self.seen_seq, self.code)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)

    format: int
    last: _Last | None = None


class Snapshots:
    """Those of one role."""

    def __init__(self, cell_of: CellOf, role: str) -> None:
        self._cell_of = cell_of
        self._role = role

    async def write(self, about: About, pieces: AsyncIterable[bytes]) -> int:
        """Keep a new one in place of the last; returns its bytes. `pieces` are of any length, and `announced`: of what does not
        fit nothing is written.

        Errors: Unavailable; WrongLastSequence if another process has begun one meanwhile; TooLarge; what `pieces` raise.
        """
        waiting = _of_equal_length(pieces)
        size_bytes: int = LENGTH.unpack(await anext(waiting))[0]
        if size_bytes > SNAPSHOT_BYTES_MAX:
            raise TooLarge(f"a snapshot has at most {SNAPSHOT_BYTES_MAX:,} bytes, and this one has more")
        record = self._cell_of(self._role)
        found = await record.read()
        known = (_record(found[1]) if found else None) or _Record(format=FORMAT)
        claim = await record.write(known.model_dump_json().encode(), found[0] if found else 0)
        slot = 1 - known.last.slot if known.last else 0
        digest, number = sha256(), 0
        async for piece in waiting:
            digest.update(piece)
            await self._write_piece(self._piece(slot, number), piece, claim)
            number += 1
        last = _Last(**about._asdict(), slot=slot, size_bytes=size_bytes, digest=digest.hexdigest())
        await record.write(_Record(format=FORMAT, last=last).model_dump_json().encode(), claim)
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
        if (last := record.last) is None:
            return None
        if (reason := fits(last.about)) is not None:
            raise BadSnapshot(reason)
        whole = bytearray()
        for number in range(-(-last.size_bytes // PIECE_BYTES)):
            piece = await self._piece(last.slot, number).read()
            whole += piece[1] if piece else b""
        if len(whole) != last.size_bytes or sha256(whole).hexdigest() != last.digest:
            raise BadSnapshot("its pieces are not those that were written")
        return bytes(whole)

    async def _write_piece(self, cell: Cell, value: bytes, claim: int) -> None:
        there = await cell.read()
        record = await self._cell_of(self._role).read()
        if record is None or record[0] != claim:
            raise WrongLastSequence("another process has begun to keep a snapshot")
        await cell.write(value, there[0] if there else 0)

    def _piece(self, slot: int, number: int) -> Cell:
        return self._cell_of(f"{self._role}.{slot}.{number}")


def announced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces behind their length. They are in memory until the last is there, but no more than may be kept."""
    kept: list[bytes] = []
    size_bytes = 0
    for piece in pieces:
        kept.append(piece)
        size_bytes += len(piece)
        if size_bytes > SNAPSHOT_BYTES_MAX:
            break
    yield LENGTH.pack(size_bytes)
    yield from kept


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


async def _of_equal_length(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The length that the bytes begin with, and the others in pieces of `PIECE_BYTES`, the last one shorter."""
    waiting, wanted = bytearray(), LENGTH.size
    async for piece in pieces:
        waiting += piece
        while len(waiting) >= wanted:
            yield bytes(waiting[:wanted])
            del waiting[:wanted]
            wanted = PIECE_BYTES
    if waiting:
        yield bytes(waiting)
