"""A bundle: the record from its beginning, or from a seal in its middle, to some place, as one file that another database can
take in.

A gzip stream of frames, each one byte that says its kind, four that say its length, and its content:
- `H`, first: format, version and pool. Whatever a later version changes, it begins with this.
- for each log, oldest first: `L`, what the log is; in stream order `R` for each row and `D` where rows of days that went by
  policy would be, with the head from which the chain goes on; then `E`, how far the log goes and where its chains end.
- behind the `L` of a bundle that begins in the middle, `M` for each row of the snapshot that was sealed there, and `S` for the
  pieces of the state there: of the read models, and of what the deciders had folded.
- `Z`, last: how many rows there were. A file without it is not whole.

A row is the number of its table, its sequence, its link in the chain and the published bytes. Columns are not in the file:
they follow from the bytes. The gzip stream adds a checksum. Pure but for the file.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import BinaryIO, Literal, NamedTuple, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError

from services.ledger.records import LOG_TABLES, LogTable

VERSION = 1
VERSION_OF_PARTS = 2
"""A bundle that begins in the middle: who reads only version 1 could not tell that its beginning is missing."""

STATE_BYTES_MAX = 2**30
STATE_PIECE_BYTES = 8 * 2**20
SNAPSHOT_ROWS_MAX = 10_000_000

COMPRESSION = 6
"""Leaves four tenths of the published bytes, most of them block ids, which are as good as random: no level gets below that."""

_FRAME = struct.Struct(">cI")
_ROW = struct.Struct(">BQ32s")
FRAME_BYTES_MAX = 64 * 2**20 + _ROW.size
"""NATS takes no message above 64 MiB; nothing longer is held in memory."""


class BadBundle(ValueError):
    """The file is no bundle, of a version that cannot be read, or not whole. The message says which, and where."""


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


class Header(_Frame):
    """What the file is."""

    format: Literal["vertumnus-record"] = "vertumnus-record"
    version: int = VERSION
    pool: str


class Gap(_Frame):
    """Sequences that the stream had dropped before they were recorded, and who accepted that."""

    from_seq: int
    to_seq: int
    accepted_at: datetime
    accepted_by: str
    reason: str


class PartBegins(_Frame):
    """The bundle has what lies behind `stream_seq`, where the chains had these heads."""

    stream_seq: int
    heads: Mapping[LogTable, bytes]


class LogBegins(_Frame):
    """One log: what it is and what it follows. `begins` is set for the first one of a bundle that begins in its middle."""

    log: UUID
    number: int
    stream: UUID
    opened_at: datetime
    predecessor: UUID | None
    predecessor_seq: int | None
    gaps: tuple[Gap, ...]
    begins: PartBegins | None = None


class SnapshotRow(_Frame):
    """A row of a read model as the sealed snapshot has it, as JSON."""

    model: str
    value: str


class StatePiece(_Frame):
    """The next piece of a frozen state."""

    of: Literal["models", "deciders"]
    content: bytes


class ChainResumes(_Frame):
    """Rows of `block_events` are gone by policy, and the chain goes on from `head`."""

    head: bytes


class LogEnds(_Frame):
    """The log goes to `stream_seq`, which may lie behind its last row, and its chains end at `heads`."""

    stream_seq: int
    heads: Mapping[LogTable, bytes]


class BundleEnds(_Frame):
    """Nothing follows."""

    rows: int


class Row(NamedTuple):
    """One row of the record."""

    table: LogTable
    stream_seq: int
    chain: bytes
    raw: bytes


Frame = LogBegins | SnapshotRow | StatePiece | Row | ChainResumes | LogEnds | BundleEnds

_KINDS: Mapping[type[_Frame], bytes] = {
    Header: b"H",
    LogBegins: b"L",
    SnapshotRow: b"M",
    StatePiece: b"S",
    ChainResumes: b"D",
    LogEnds: b"E",
    BundleEnds: b"Z",
}
_BODIES: Mapping[bytes, type[LogBegins | SnapshotRow | StatePiece | ChainResumes | LogEnds | BundleEnds]] = {
    b"L": LogBegins,
    b"M": SnapshotRow,
    b"S": StatePiece,
    b"D": ChainResumes,
    b"E": LogEnds,
    b"Z": BundleEnds,
}

T = TypeVar("T", bound=_Frame)


class BundleWriter:
    """Writes frames into a file that is open for bytes. Closing it does not close the file."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        # Without a name and a time, equal records give equal files.
        self._stream = gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0)
        self._write(b"H", header.model_dump_json().encode())
        self.rows = 0

    def tell(self, frame: Frame) -> None:
        """The next frame."""
        if isinstance(frame, Row):
            self.rows += 1
            place = _ROW.pack(LOG_TABLES.index(frame.table), frame.stream_seq, frame.chain)
            self._write(b"R", place + frame.raw)
        else:
            self._write(_KINDS[type(frame)], frame.model_dump_json().encode())

    def close(self) -> None:
        """Say that it is whole."""
        self.tell(BundleEnds(rows=self.rows))
        self._stream.close()

    def _write(self, kind: bytes, content: bytes) -> None:
        self._stream.write(_FRAME.pack(kind, len(content)))
        self._stream.write(content)


class BundleReader:
    """Reads a file from its first byte to its last, a frame at a time."""

    def __init__(self, file: BinaryIO) -> None:
        """Errors: BadBundle; OSError when the file cannot be read."""
        self._stream = gzip.GzipFile(fileobj=file, mode="rb")
        try:
            kind, content = self._frame()
        except BadBundle as error:
            raise BadBundle(f"not a bundle of a record: {error}") from error
        if kind != b"H":
            raise BadBundle("not a bundle of a record: it does not begin with a header")
        self.header = _body(Header, content)
        if self.header.version not in (VERSION, VERSION_OF_PARTS):
            raise BadBundle(
                f"version: the bundle is of version {self.header.version}, this program reads {VERSION} and {VERSION_OF_PARTS}"
            )

    def frames(self) -> Iterator[Frame]:
        """What follows the header, up to and with `BundleEnds`; then the file has been read to its end.

        Errors: BadBundle at the first frame that is wrong.
        """
        rows = 0
        while True:
            kind, content = self._frame()
            if kind == b"R":
                rows += 1
                yield _row(content)
                continue
            if (body := _BODIES.get(kind)) is None:
                raise BadBundle(f"after {rows} rows: {kind!r} is no kind of frame")
            frame = _body(body, content)
            if isinstance(frame, BundleEnds):
                self._end(frame, rows)
                yield frame
                return
            yield frame

    def _end(self, frame: BundleEnds, rows: int) -> None:
        if frame.rows != rows:
            raise BadBundle(f"rows: the bundle says that it has {frame.rows}, there are {rows}")
        # The checksum lies at the end, and is compared when there is nothing more to read.
        if self._bytes(1):
            raise BadBundle(f"after its end, behind {rows} rows, the bundle goes on")

    def _frame(self) -> tuple[bytes, bytes]:
        kind, length = _FRAME.unpack(self._whole(_FRAME.size))
        if length > FRAME_BYTES_MAX:
            raise BadBundle(f"a frame of {length} bytes; {FRAME_BYTES_MAX} is the most")
        return kind, self._whole(length)

    def _whole(self, size: int) -> bytes:
        content = self._bytes(size)
        if len(content) != size:
            raise BadBundle("the bundle is cut off: it ends before it says so")
        return content

    def _bytes(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except EOFError as error:
            raise BadBundle("the bundle is cut off: its compressed stream has no end") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadBundle(f"the compressed stream is damaged: {error}") from error


def _row(content: bytes) -> Row:
    if len(content) < _ROW.size:
        raise BadBundle(f"a row of {len(content)} bytes; {_ROW.size} is the least")
    table, stream_seq, chain = _ROW.unpack_from(content)
    if table >= len(LOG_TABLES):
        raise BadBundle(f"row {stream_seq}: there is no table {table}")
    return Row(LOG_TABLES[table], stream_seq, chain, content[_ROW.size :])


def _body(kind: type[T], content: bytes) -> T:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise BadBundle(f"{kind.__name__}: {field}: {first['msg']}") from error
