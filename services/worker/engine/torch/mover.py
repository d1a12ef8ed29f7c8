"""The mover: the one process of a node that copies KV between workers, beside the ranks and not in their way.

It maps every rank's pool. What lies on its own node it copies in memory, what lies on another it reads over NIXL into the
slots where it is to stay. A rank could not do that: it handles one command at a time, and a step may take a minute.

A move goes chunk by chunk. Its slots are marked as being written, filled, the generations at the source compared *after* the
data is here, the slots published. A chunk that does not pass leaves its slots unpublished and ends the move. Crash-only: a
read that is still under way when its move must end cannot be called back (a released handle may be written to afterwards, as
was seen with a stopped source), so the mover says how far everybody came and ends; only when it is gone is a slot free.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from services.worker.engine.copy_plan import CopyFailure
from services.worker.engine.torch.kv_device import opened
from services.worker.engine.torch.kv_layout import GENERATION_BYTES
from services.worker.engine.torch.kv_memory import Base, KvMemory, Plan, StaleSlot, plan_of
from services.worker.engine.torch.messages import (
    Command,
    Done,
    Reply,
    frame,
    receive,
)
from services.worker.engine.torch.move_messages import (
    BeginMoving,
    BlockMove,
    Lend,
    Move,
    Moved,
    Moving,
    StopMove,
    Sum,
    Sums,
)
from services.worker.engine.torch.wire import Memory, Peer, Piece, Unreachable, Wire

MOVES_MAX = 16
"""Moves at a time, each with one chunk under way."""

CHUNK_BYTES = 4 << 20
"""Large enough that its overhead is below a tenth, small enough that a call-off waits a millisecond. At least one block."""

CHUNK_S = 0.01
"""A chunk is not worth more than this of the copies' bandwidth, so that a small share is taken in small pieces."""

CHUNK_BLOCKS_MAX = 256
IDLE_TICK_S = 0.05
LENDING_TICK_S = 0.0005
"""How often this side looks whether a reader needs it. One that reads by CMA does so once, to connect."""


class _Ended(Exception):
    """A move has come to its end early."""

    def __init__(self, failure: CopyFailure, detail: str) -> None:
        super().__init__(detail)
        self.failure: CopyFailure = failure


@dataclass(slots=True)
class _Pace:
    """All moves together take `bytes_per_s`: after each chunk nothing begins before the time that it was worth."""

    bytes_per_s: float
    free_at_s: float = 0.0

    def spend(self, size: int) -> None:
        self.free_at_s = max(self.free_at_s, time.monotonic()) + size / self.bytes_per_s

    def wait_s(self) -> float:
        return max(0.0, self.free_at_s - time.monotonic())


class _Move:
    """One move, advanced by `next`. `reading` while a read is under way that cannot be called back."""

    def __init__(self, command: Move, memory: KvMemory, wire: Wire, words: torch.Tensor, pace: _Pace) -> None:
        """`words` is this move's own registered memory: room for the generations of a chunk."""
        self.command, self.began_s = command, time.monotonic()
        self.blocks = self.bytes = 0
        self.stopped = self.reading = False
        self._memory, self._wire, self.words, self._pace = memory, wire, words, pace
        self._steps = self._run()

    def advance(self) -> Moved | None:
        """A bit further; the answer when it has ended. Sets `reading`, and then the answer abandons the mover."""
        try:
            if self.stopped:
                raise _Ended("cancelled", "called off")
            if time.monotonic() - self.began_s > self.command.limit_s:
                raise _Ended("time-limit", f"not done within {self.command.limit_s:g} s")
            next(self._steps)
        except StopIteration:
            return self.answer(None, "")
        except _Ended as ended:
            return self.answer(ended.failure, str(ended))
        except StaleSlot as error:
            return self.answer("stale-source", str(error))
        except Unreachable as error:
            self.reading = False
            return self.answer("source-lost", str(error))
        return None

    def answer(self, failure: CopyFailure | None, detail: str) -> Moved:
        seconds = time.monotonic() - self.began_s
        return Moved(self.command.n, self.blocks, self.bytes, seconds, failure, detail, self.reading)

    def _run(self) -> Iterator[None]:
        for access, chunk in self._chunks():
            written = plan_of(enumerate(block.to for block in chunk))
            self._memory.begin_write(written)
            if access is None:
                self._copy(chunk)
            else:
                yield from self._read(self._wire.peer(self.command.accesses[access]), chunk)
            self._compare_checksums(chunk)
            self._memory.finish_write(written)
            size = len(chunk) * self._memory.layout.block_bytes
            self._pace.spend(size)
            self.blocks, self.bytes = self.blocks + len(chunk), self.bytes + size
            yield

    def _chunks(self) -> Iterator[tuple[int | None, Sequence[BlockMove]]]:
        chunk_bytes = min(CHUNK_BYTES, int(self._pace.bytes_per_s * CHUNK_S))
        size = max(1, min(CHUNK_BLOCKS_MAX, chunk_bytes // self._memory.layout.block_bytes))
        for access, found in groupby(self.command.blocks, key=lambda block: block.access):
            blocks = list(found)
            for start in range(0, len(blocks), size):
                yield access, blocks[start : start + size]

    def _copy(self, chunk: Sequence[BlockMove]) -> None:
        sources: Plan = plan_of(enumerate(block.source for block in chunk))
        self._memory.check(sources)
        for block in chunk:
            self._memory.copy_block(block.source, block.to)
        self._memory.check(sources)

    def _read(self, peer: Peer, chunk: Sequence[BlockMove]) -> Iterator[None]:
        layout, ours, theirs = self._memory.layout, self._memory.slot_bases, peer.access
        limits = len(theirs.slots), theirs.layout.blocks
        for source in (block.source for block in chunk):
            if not (source.rank < limits[0] and source.index < limits[1]):
                raise _Ended("stale-source", f"{source}: the node has {limits[0]} ranks of {limits[1]} slots")
        slots = [
            Piece(
                ours[block.to.rank].after(layout.slot_offset(block.to.index)),
                theirs.slots[block.source.rank].after(layout.slot_offset(block.source.index)),
                layout.block_bytes,
            )
            for block in chunk
        ]
        yield from self._wait(peer, slots, self._wire.memory, theirs.memory)
        # Only now: a generation that was read before the data would say nothing about it.
        words = [
            Piece(
                Base(self.words.data_ptr() + number * GENERATION_BYTES, 0),
                Base(theirs.generations[block.source.rank] + block.source.index * GENERATION_BYTES, 0),
                GENERATION_BYTES,
            )
            for number, block in enumerate(chunk)
        ]
        yield from self._wait(peer, words, "DRAM", "DRAM")
        found, meant = self.words[: len(chunk)].tolist(), [block.source.generation for block in chunk]
        if found != meant:
            raise _Ended("stale-source", f"{peer.access.name}: slots of generations {meant} are at {found}")

    def _wait(self, peer: Peer, pieces: Sequence[Piece], here: Memory, there: Memory) -> Iterator[None]:
        handle = self._wire.read(peer, pieces, here, there)
        self.reading = True
        while not self._wire.done(peer, handle):
            yield
        self.reading = False

    def _compare_checksums(self, chunk: Sequence[BlockMove]) -> None:
        for block in chunk:
            if block.checksum is not None and (found := self._memory.checksum(block.to)) != block.checksum:
                raise _Ended("bad-checksum", f"{block.source}: {found:08x} came of {block.checksum:08x}")


class _Mover:
    """See the module docstring."""

    def __init__(self, control: socket.socket, begin: BeginMoving, pools: Sequence[int]) -> None:
        self._control = control
        self._memory = KvMemory(begin.layout, pools, [opened(shared) for shared in begin.pools])
        words = torch.zeros((MOVES_MAX, CHUNK_BLOCKS_MAX), dtype=torch.int64, device="cpu")
        self._wire = Wire(begin.name, begin.model, self._memory, words)
        self._words = list(words)
        self._pace = _Pace(begin.bytes_per_s)
        self._moves: deque[_Move] = deque()
        self._lending = False
        self._say(Moving(begin.n, self._wire.access, self._wire.detail))

    def serve(self) -> None:
        """Until the frontend is gone, or a read has to be abandoned."""
        while True:
            if select.select([self._control], [], [], self._wait_s())[0]:
                message = receive(self._control)
                if message is None:
                    return
                assert not isinstance(message, Reply), f"the frontend sends commands, not {message}"
                self._handle(message)
            self._wire.progress()
            if self._moves and not self._pace.wait_s() and self._advance():
                return

    def _wait_s(self) -> float:
        tick_s = LENDING_TICK_S if self._lending else IDLE_TICK_S
        return min(self._pace.wait_s(), tick_s) if self._moves else tick_s

    def _handle(self, command: Command) -> None:
        match command:
            case Move():
                self._moves.append(_Move(command, self._memory, self._wire, self._words.pop(), self._pace))
            case StopMove():
                for move in self._moves:
                    move.stopped = move.stopped or move.command.n == command.of
                self._say(Done(command.n))
            case Lend():
                self._lending = command.on
                self._say(Done(command.n))
            case Sum():
                self._say(Sums(command.n, tuple(map(self._memory.checksum, command.slots))))
            case _:
                raise TypeError(f"a mover knows no {command.kind}")

    def _advance(self) -> bool:
        """One move goes on, then it is the next one's turn. Whether the mover has to end."""
        move = self._moves.popleft()
        answer = move.advance()
        if answer is None:
            self._moves.append(move)
            return False
        self._words.append(move.words)
        if answer.abandoned:
            for other in self._moves:
                other.reading = True
                self._say(other.answer("source-lost", "the mover ended over another copy"))
        self._say(answer)
        return answer.abandoned

    def _say(self, reply: Reply) -> None:
        self._control.sendall(frame(reply))


def serve_moves(control: socket.socket, begin: BeginMoving, pools: Sequence[int]) -> None:
    """The whole life of a mover process. `pools` are the descriptors of all KV pools, in rank order."""
    _Mover(control, begin, pools).serve()
