"""Snapshots in cells of memory and of a real NATS server, and the copy of a process that writes them."""

import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing

import pytest

from shared.runtime import snapshots as snapshots_module
from shared.runtime.memory import MemoryCell
from shared.runtime.nats_cell import SNAPSHOTS, NatsCell, open_snapshots
from shared.runtime.ports import WrongLastSequence
from shared.runtime.process_copy import CopyFailed, ProcessCopy
from shared.runtime.snapshots import (
    LENGTH,
    PIECE_BYTES,
    About,
    BadSnapshot,
    CellOf,
    Snapshots,
    TooLarge,
    announced,
    code_of,
)
from tests.runtime.conftest import CLOCK, SUBJECTS, NatsClient

ABOUT = About("log", 7, "code")


@pytest.fixture(params=["memory", "nats"])
async def cell_of(request: pytest.FixtureRequest) -> AsyncIterator[CellOf]:
    if request.param == "memory":
        yield defaultdict(MemoryCell).__getitem__
        return
    async with AsyncExitStack() as stack:
        client = NatsClient(request.getfixturevalue("nats_server").url, stack)
        link = await client.link()
        await open_snapshots(link, SUBJECTS, replicas=1, clock=CLOCK)
        yield lambda key: NatsCell(link, SUBJECTS, SNAPSHOTS, key)


async def given(*pieces: bytes) -> AsyncIterator[bytes]:
    for each in announced(pieces):
        yield each


def anything(_: About) -> None:
    return None


async def test_the_last_one_written_is_read(cell_of: CellOf) -> None:
    kept = Snapshots(cell_of, "role")
    assert await kept.read(anything) is None
    long = os.urandom(2 * PIECE_BYTES + 9)
    for whole in (long, b"", b"short", long[::-1], b"again"):
        assert await kept.write(ABOUT, given(whole[:5], whole[5:])) == len(whole)
        assert await kept.read(anything) == whole
    heard: list[About] = []
    with pytest.raises(BadSnapshot, match="of no use"):
        await kept.read(lambda about: heard.append(about) or "of no use")
    assert heard == [ABOUT]


async def test_one_that_breaks_off_replaces_nothing(cell_of: CellOf, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Snapshots(cell_of, "role")
    await kept.write(ABOUT, given(b"first"))

    async def breaks() -> AsyncIterator[bytes]:
        yield LENGTH.pack(PIECE_BYTES + 1)
        yield os.urandom(PIECE_BYTES)
        raise CopyFailed("gone")

    with pytest.raises(CopyFailed):
        await kept.write(ABOUT, breaks())
    broken_off = await cell_of("role.1.0").read()
    assert broken_off is not None
    monkeypatch.setattr(snapshots_module, "SNAPSHOT_BYTES_MAX", PIECE_BYTES)
    with pytest.raises(TooLarge):
        await kept.write(ABOUT, given(b"small", os.urandom(PIECE_BYTES), os.urandom(9)))
    assert await cell_of("role.1.0").read() == broken_off, "of what does not fit nothing is written"
    assert await kept.read(anything) == b"first"


async def test_pieces_are_announced_before_the_first_and_only_as_many_as_may_be_kept(monkeypatch) -> None:
    assert [*announced([b"abc", b"", b"de"])] == [LENGTH.pack(5), b"abc", b"", b"de"]
    monkeypatch.setattr(snapshots_module, "SNAPSHOT_BYTES_MAX", 4)
    endless = (bytes(3) for _ in itertools.count())
    assert next(announced(endless)) == LENGTH.pack(6)


async def test_the_first_one_may_break_off(cell_of: CellOf) -> None:
    kept = Snapshots(cell_of, "role")

    async def breaks() -> AsyncIterator[bytes]:
        yield LENGTH.pack(9)
        raise CopyFailed("gone")

    with pytest.raises(CopyFailed):
        await kept.write(ABOUT, breaks())
    assert await kept.read(anything) is None


@pytest.mark.parametrize("written", [0, 1, 2, 3])
async def test_of_two_that_write_at_once_the_one_that_began_last_holds(cell_of: CellOf, written: int) -> None:
    one, other = Snapshots(cell_of, "role"), Snapshots(cell_of, "role")
    await one.write(ABOUT, given(b"before"))
    of_one, of_other = (os.urandom(3 * PIECE_BYTES) for _ in range(2))

    async def overtaken() -> AsyncIterator[bytes]:
        yield LENGTH.pack(len(of_one))
        yield of_one[: written * PIECE_BYTES]
        await other.write(ABOUT, given(of_other))
        yield of_one[written * PIECE_BYTES :]

    with pytest.raises(WrongLastSequence):
        await one.write(ABOUT, overtaken())
    assert await one.read(anything) == of_other
    await one.write(ABOUT, given(b"next"))
    assert await other.read(anything) == b"next"


class Overtaken:
    """Cells for one writer; just before its call number `turn` another one writes a whole snapshot. In memory."""

    def __init__(self, turn: int) -> None:
        self.cells: dict[str, MemoryCell] = defaultdict(MemoryCell)
        self.calls, self.turn = 0, turn
        self.other = Snapshots(self.cells.__getitem__, "role")

    def cell(self, key: str) -> "OvertakenCell":
        return OvertakenCell(self, key)

    async def call(self) -> None:
        self.calls += 1
        if self.calls == self.turn:
            await self.other.write(ABOUT, given(b"other" * PIECE_BYTES))


class OvertakenCell:
    def __init__(self, world: Overtaken, key: str) -> None:
        self._world, self._cell = world, world.cells[key]

    async def read(self) -> tuple[int, bytes] | None:
        await self._world.call()
        return await self._cell.read()

    async def write(self, value: bytes, revision: int) -> int:
        await self._world.call()
        return await self._cell.write(value, revision)


async def test_who_is_overtaken_before_any_of_its_calls_spoils_nothing() -> None:
    turn, calls = 0, 1
    while turn <= calls:
        turn += 1
        world = Overtaken(turn)
        await world.other.write(ABOUT, given(b"before"))
        try:
            await Snapshots(world.cell, "role").write(ABOUT, given(b"one" * PIECE_BYTES))
            kept = b"one" * PIECE_BYTES
        except WrongLastSequence:
            kept = b"other" * PIECE_BYTES
        assert await world.other.read(anything) == kept, f"overtaken before call {turn}"
        calls = max(calls, world.calls)
    assert calls == 12, "two of the record at first, three for each of three pieces, and the record"


async def test_what_is_damaged_is_refused() -> None:
    cells: dict[str, MemoryCell] = defaultdict(MemoryCell)
    kept = Snapshots(cells.__getitem__, "role")
    await kept.write(ABOUT, given(b"whole"))
    await cells["role.0.0"].write(b"whol3", 1)
    with pytest.raises(BadSnapshot, match="not those that were written"):
        await kept.read(anything)
    for record in (b"", b"{}", b"no record"):
        await cells["role"].write(record, (await cells["role"].read() or (0, b""))[0])
        with pytest.raises(BadSnapshot, match="cannot be read"):
            await kept.read(anything)
    await kept.write(ABOUT, given(b"mended"))
    assert await kept.read(anything) == b"mended"


def test_other_code_has_another_digest() -> None:
    assert code_of("shared.model") == code_of("shared.model") != code_of("shared.model", "shared.contracts")


async def test_a_copy_tells_what_was_when_it_was_made() -> None:
    state = [1]

    def work() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(state) * 10_000

    async with aclosing(ProcessCopy(work)) as told:
        state[0] = 2
        whole = b"".join([each async for each in told])
    assert whole == bytes([1]) * 1_000_000


async def test_a_copy_that_fails_says_so_and_one_that_is_not_read_ends() -> None:
    def fails() -> Iterator[bytes]:
        yield b"some"
        raise AssertionError("as it should")

    with pytest.raises(CopyFailed):
        async with aclosing(ProcessCopy(fails)) as told:
            [each async for each in told]

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(1_000)

    async with aclosing(ProcessCopy(endless)) as unread:
        pass
    async with aclosing(ProcessCopy(endless)) as left:
        async for _ in left:
            break
    for each in (unread, left):
        with pytest.raises(ChildProcessError):
            each._status(0)
