"""The mover: the one process of a node that copies KV, beside the ranks and not in their way: between workers, and from a
prefill to the decode rank that goes on from it.

It maps every rank's pool. What lies on its own node it copies in memory, what lies on another it reads over NIXL to where it is
to stay. A rank could not do that: it handles one command at a time, and a step may take a minute.

A move goes chunk by chunk. Its slots are marked as being written, filled, the generations at the source compared *after* the
data is here, the slots published (`destinations`). A chunk that does not pass leaves its slots unpublished and ends the move.
Crash-only: a read that is still under way when its move must end cannot be called back (a released handle may be written to
afterwards, as was seen with a stopped source), so the mover says how far everybody came and ends; only when it is gone is a
slot free.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import torch

from services.worker.engine.copy_plan import CopyFailure
from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.destinations import Destination, IntoContext, IntoSlots
from services.worker.engine.torch.kv_device import opened
from services.worker.engine.torch.kv_layout import GENERATION_BYTES
from services.worker.engine.torch.kv_memory import Base, KvMemory, Plan, StaleSlot, checksum, plan_of
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
    ContextRef,
    Lend,
    Move,
    Moved,
    Moving,
    Reach,
    Reachable,
    StopMove,
    Sum,
    Sums,
)
from services.worker.engine.torch.wire import Memory, Peer, Piece, Unreachable, Wire

COPIES_MAX, HAND_OFFS_MAX = 16, 16
MOVES_MAX = COPIES_MAX + HAND_OFFS_MAX
"""Moves at a time, each with one chunk under way; neither kind takes the other's places."""

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

    def __init__(
        self,
        command: Move,
        memory: KvMemory,
        to: Destination,
        wire: Callable[[], Wire],
        words: torch.Tensor,
        pace: _Pace,
    ) -> None:
        """`words` is this move's own registered memory: room for the generations of a chunk."""
        self.command, self.began_s = command, time.monotonic()
        self.blocks = self.bytes = 0
        self.stopped = self.reading = False
        self._memory, self._to, self._wire, self.words, self._pace = memory, to, wire, words, pace
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
            self.reading = error.writing
            return self.answer("source-lost", str(error))
        return None

    def answer(self, failure: CopyFailure | None, detail: str) -> Moved:
        seconds = time.monotonic() - self.began_s
        return Moved(self.command.n, self.blocks, self.bytes, seconds, failure, detail, self.reading)

    def _run(self) -> Iterator[None]:
        for access, chunk in self._chunks():
            self._to.begin(chunk)
            if access is None:
                self._copy(chunk)
            else:
                yield from self._read(self._wire(), self.command.accesses[access], chunk)
            self._compare_checksums(chunk)
            self._to.finish(chunk)
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
            self._to.block(block).copy_(self._memory.block(block.source))
        self._memory.check(sources)

    def _read(self, wire: Wire, access: str, chunk: Sequence[BlockMove]) -> Iterator[None]:
        peer = wire.peer(access)
        layout, theirs = self._memory.layout, peer.access
        limits = len(theirs.slots), theirs.layout.blocks
        for source in (block.source for block in chunk):
            if not (source.rank < limits[0] and source.index < limits[1]):
                raise _Ended("stale-source", f"{source}: the node has {limits[0]} ranks of {limits[1]} slots")
        slots = [
            Piece(
                part.here,
                theirs.slots[block.source.rank].after(layout.slot_offset(block.source.index) + part.offset),
                part.bytes,
            )
            for block in chunk
            for part in self._to.parts(block)
        ]
        yield from self._wait(wire, peer, slots, wire.memory, theirs.memory)
        # Only now: a generation that was read before the data would say nothing about it.
        words = [
            Piece(
                Base(self.words.data_ptr() + number * GENERATION_BYTES, 0),
                Base(theirs.generations[block.source.rank] + block.source.index * GENERATION_BYTES, 0),
                GENERATION_BYTES,
            )
            for number, block in enumerate(chunk)
        ]
        yield from self._wait(wire, peer, words, "DRAM", "DRAM")
        found, meant = self.words[: len(chunk)].tolist(), [block.source.generation for block in chunk]
        if found != meant:
            raise _Ended("stale-source", f"{peer.access.name}: slots of generations {meant} are at {found}")

    def _wait(self, wire: Wire, peer: Peer, pieces: Sequence[Piece], here: Memory, there: Memory) -> Iterator[None]:
        handle = wire.read(peer, pieces, here, there)
        self.reading = True
        while not wire.done(peer, handle):
            yield
        self.reading = False

    def _compare_checksums(self, chunk: Sequence[BlockMove]) -> None:
        for block in chunk:
            if block.checksum is not None and (found := checksum(self._to.block(block))) != block.checksum:
                raise _Ended("bad-checksum", f"{block.source}: {found:08x} came of {block.checksum:08x}")


class _Mover:
    """See the module docstring."""

    def __init__(self, control: socket.socket, begin: BeginMoving, files: Sequence[int]) -> None:
        self._control, self._begin = control, begin
        pools, contexts = files[: begin.prefill_ranks], files[begin.prefill_ranks :]
        self._memory = KvMemory(begin.layout, pools, [opened(shared) for shared in begin.pools])
        decode_pools = map(opened, begin.decode_pools) if begin.decode_pools else repeat(None)
        self._contexts = [Contexts(begin.contexts, *each) for each in zip(contexts, decode_pools, strict=False)]
        self._all_words = torch.zeros((MOVES_MAX, CHUNK_BLOCKS_MAX), dtype=torch.int64, device="cpu")
        self._words = list(self._all_words)
        self._wire: Wire | None = None
        self._pace = _Pace(begin.bytes_per_s)
        self._moves: deque[_Move] = deque()
        self._lending = False
        self._say(Moving(begin.n))

    def serve(self) -> None:
        """Until the frontend is gone, or a read has to be abandoned."""
        while True:
            if select.select([self._control], [], [], self._wait_s())[0]:
                message = receive(self._control)
                if message is None:
                    return
                assert not isinstance(message, Reply), f"the frontend sends commands, not {message}"
                self._handle(message)
            if self._wire is not None:
                self._wire.progress()
            if self._moves and not self._pace.wait_s() and self._advance():
                return

    def _wait_s(self) -> float | None:
        """Without end where nobody can reach this node, and nothing is to be moved."""
        tick_s = LENDING_TICK_S if self._lending else IDLE_TICK_S
        if self._moves:
            return min(self._pace.wait_s(), tick_s)
        return None if self._wire is None else tick_s

    def _reachable(self) -> Wire:
        if self._wire is None:
            contexts = [(each.base, each.layout.file_bytes) for each in self._contexts]
            self._wire = Wire(self._begin.name, self._begin.model, self._memory, contexts, self._all_words)
        return self._wire

    def _move(self, command: Move) -> _Move:
        into_context = isinstance(command.blocks[0].to, ContextRef)
        to = IntoContext(self._memory, self._contexts) if into_context else IntoSlots(self._memory)
        return _Move(command, self._memory, to, self._reachable, self._words.pop(), self._pace)

    def _handle(self, command: Command) -> None:
        match command:
            case Move():
                self._moves.append(self._move(command))
            case StopMove():
                for move in self._moves:
                    move.stopped = move.stopped or move.command.n == command.of
                self._say(Done(command.n))
            case Lend():
                self._lending = command.on
                self._say(Done(command.n))
            case Reach():
                wire = self._reachable()
                self._say(Reachable(command.n, wire.access, wire.detail))
            case Sum():
                self._say(Sums(command.n, tuple(checksum(self._memory.block(slot)) for slot in command.slots)))
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


def serve_moves(control: socket.socket, begin: BeginMoving, files: Sequence[int]) -> None:
    """The whole life of a mover process. `files` are the descriptors of all ranks' memory, in rank order."""
    _Mover(control, begin, files).serve()
