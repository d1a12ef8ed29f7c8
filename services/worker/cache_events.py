"""What a node says of its workers' caches: changes, numbered without a gap, and full reports. Pure."""

from collections.abc import Sequence
from typing import Literal

from services.worker.engine.copy_plan import Copied, Evicted
from services.worker.engine.protocol import Resident, Stored
from shared.contracts.envelope import EventData
from shared.contracts.events import BlockRun, BlocksEvicted, BlocksStored, CacheReported
from shared.contracts.ids import BlockId, RequestId, WorkerId

CopyCause = Literal["replication", "reconciliation", "fetch"]

EVENT_BLOCKS_MAX = 30_000
"""Block ids in one event: 640 KB as base64, well below what an event may have."""

RUN_BLOCKS = 3
"""What a run adds to its ids, its parent and its JSON, takes the room of so many more. A trie with one long stem and a
thousand short branches is mostly runs."""


def changes(
    worker: WorkerId, incarnation: int, number: int, evicted: Sequence[BlockId], request: RequestId, stored: Stored
) -> list[EventData]:
    """A prefill's changes, numbered from `number` + 1: what had to go first, then what came."""
    events = evictions(worker, incarnation, number, evicted, "pressure")
    if stored.blocks:
        events.append(
            BlocksStored(
                worker=worker,
                incarnation=incarnation,
                number=number + len(events) + 1,
                cause="prefill",
                request=request,
                first_depth=stored.first_depth,
                blocks=stored.blocks,
            )
        )
    return events


def copied(worker: WorkerId, incarnation: int, number: int, cause: CopyCause, copy: Copied) -> list[EventData]:
    """A copy's changes, numbered from `number` + 1: what had to go first, then what came."""
    events = evictions(worker, incarnation, number, copy.evicted, "pressure")
    if copy.blocks:
        events.append(
            BlocksStored(
                worker=worker,
                incarnation=incarnation,
                number=number + len(events) + 1,
                cause=cause,
                first_depth=copy.first_depth,
                blocks=len(copy.blocks),
                runs=(BlockRun(parent=copy.parent, block_ids=b"".join(copy.blocks)),),
            )
        )
    return events


def reclaimed(worker: WorkerId, incarnation: int, number: int, gone: Evicted) -> list[EventData]:
    """An eviction on demand, numbered from `number` + 1: what had gone before, then what was asked for."""
    before = evictions(worker, incarnation, number, gone.evicted, "pressure")
    return [*before, *evictions(worker, incarnation, number + len(before), gone.freed, "reclaim")]


def evictions(
    worker: WorkerId, incarnation: int, number: int, evicted: Sequence[BlockId], cause: Literal["pressure", "reclaim"]
) -> list[EventData]:
    """Blocks that left, children before parents, numbered from `number` + 1."""
    pieces = [evicted[first : first + EVENT_BLOCKS_MAX] for first in range(0, len(evicted), EVENT_BLOCKS_MAX)]
    return [
        BlocksEvicted(
            worker=worker, incarnation=incarnation, number=number + count, cause=cause, block_ids=b"".join(piece)
        )
        for count, piece in enumerate(pieces, 1)
    ]


def report(worker: WorkerId, incarnation: int, number: int, resident: Resident) -> list[EventData]:
    """Everything the worker holds, in as many parts as it takes; one empty part if it holds nothing."""
    parts: list[list[BlockRun]] = [[]]
    room = EVENT_BLOCKS_MAX
    for parent, blocks in resident.runs:
        while blocks:
            if room <= RUN_BLOCKS:
                parts.append([])
                room = EVENT_BLOCKS_MAX
            room -= RUN_BLOCKS
            piece, blocks = blocks[:room], blocks[room:]
            parts[-1].append(BlockRun(parent=parent, block_ids=b"".join(piece)))
            parent = piece[-1]
            room -= len(piece)
    return [
        CacheReported(
            worker=worker, incarnation=incarnation, number=number, part=part, parts=len(parts), runs=tuple(runs)
        )
        for part, runs in enumerate(parts, 1)
    ]
