"""The longest match, applying what workers store, and memory: our index, and Dynamo's `RadixTree` where it is installed."""

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.router.timing import HEADING, side_by_side
from shared.contracts.ids import BlockId, WorkerId
from shared.model.prefix_index import PrefixIndex

WORKERS = 64
ROUNDS = 2_000
DEPTHS = (1, 8, 64)
PROMPT_TOKENS = 65_536
APPLY_PROMPTS = 300

Chain = list[bytes]
Tree = Any
"""Dynamo's tree; its package has no types."""


def dynamo_tree() -> Tree | None:
    """None where `ai-dynamo-runtime` is not installed."""
    with suppress(ImportError):
        from dynamo.llm import RadixTree

        return RadixTree()
    return None


def number(block: bytes) -> int:
    """A block as Dynamo names it."""
    return int.from_bytes(block[:8], "big") >> 1


def told(blocks: Chain, event: int) -> bytes:
    """What a worker tells Dynamo of a stored prompt."""
    entries = [{"block_hash": number(block), "tokens_hash": number(block)} for block in blocks]
    return json.dumps({"event_id": event, "data": {"stored": {"parent_hash": None, "blocks": entries}}}).encode()


def match() -> None:
    """Every worker's depth, for a prompt of 64K tokens that 64 workers hold to so many depths, or nobody holds."""
    chance = random.Random(1)
    for block_tokens in (64, 512):
        blocks = PROMPT_TOKENS // block_tokens
        print(f"\nlongest match, {blocks} blocks of {block_tokens} tokens, {WORKERS} workers\n{HEADING}")
        for depths in DEPTHS:
            for branched in (False, True) if depths > 1 else (False,):
                _match(chance, blocks, depths, branched)


def _match(chance: random.Random, blocks: int, depths: int, branched: bool) -> None:
    path = [chance.randbytes(16) for _ in range(blocks)]
    ours: PrefixIndex[WorkerId] = PrefixIndex()
    theirs = dynamo_tree()
    for index in range(WORKERS):
        held = path[: blocks * (index % depths + 1) // depths]
        if branched:
            held = held + [chance.randbytes(16) for _ in range(8)]
        ours.add(WorkerId(f"n{index}/1/0"), None, [BlockId(bytes(each)) for each in held])
        if theirs is not None:
            theirs.apply_event(index, told(held, 1))
    asked = [BlockId(bytes(bytearray(each))) for each in path]
    stranger = [BlockId(chance.randbytes(16)) for _ in path]
    case = "full hit" if depths == 1 else f"{depths} depths{', a branch at each' if branched else ''}"
    things: dict[str, Callable[[], object]] = {f"ours: {case}": lambda: ours.matched(asked)}
    if depths == 1:
        things["ours: miss"] = lambda: ours.matched(stranger)
    if theirs is not None:
        numbers, others = [number(each) for each in asked], [number(each) for each in stranger]
        assert len(theirs.find_matches(numbers).scores) == len(ours.matched(asked)) == WORKERS
        things[f"Dynamo RadixTree: {case}"] = lambda: theirs.find_matches(numbers)
        if depths == 1:
            things["Dynamo RadixTree: miss"] = lambda: theirs.find_matches(others)
    side_by_side(things, ROUNDS)


def apply() -> None:
    """Storing prompts of 1,024 blocks: new ones, and ones that another worker holds."""
    chance = random.Random(2)
    prompts = [[BlockId(chance.randbytes(16)) for _ in range(1_024)] for _ in range(APPLY_PROMPTS)]
    ours: PrefixIndex[WorkerId] = PrefixIndex()
    theirs = dynamo_tree()
    print("\napply, ns per block of CPU time, one event of 1,024 blocks at a time")
    for index, case in enumerate(("new blocks", "held by another worker")):
        began = time.process_time_ns()
        for prompt in prompts:
            ours.add(WorkerId(f"n{index}/1/0"), None, prompt)
        print(f"ours: {case:40} {(time.process_time_ns() - began) / APPLY_PROMPTS / 1_024:8.0f}")
        if theirs is not None:
            events = [told(list(prompt), at) for at, prompt in enumerate(prompts)]
            began = time.process_time_ns()
            for event in events:
                theirs.apply_event(index, event)
            print(f"Dynamo RadixTree: {case:28} {(time.process_time_ns() - began) / APPLY_PROMPTS / 1_024:8.0f}")


def memory(blocks: int, run_blocks: int = 64) -> None:
    """So many blocks, in prompts that share half of what is before them, each held by one worker; then all by 8 more."""
    chance = random.Random(3)
    index: PrefixIndex[WorkerId] = PrefixIndex()
    before = resident_bytes()
    trunk: list[BlockId] = []
    while len(index.index) < blocks:
        new = [BlockId(chance.randbytes(16)) for _ in range(run_blocks)]
        trunk = trunk[: len(trunk) // 2 // run_blocks * run_blocks] + new
        index.add(WorkerId("n0/1/0"), None, trunk)
        if len(trunk) > 64 * run_blocks:
            trunk = []
    used = resident_bytes() - before
    print(f"\nmemory: {len(index.index):,} blocks in {used / 2**20:,.0f} MiB, {used / len(index.index):.0f} bytes each")
    runs = [(run.above, list(run.blocks)) for run in dict.fromkeys(index.index.values())]
    runs.sort(key=lambda each: 0 if each[0] is None else index.index[each[0]].first + 1)
    before = resident_bytes()
    for worker in range(8):
        for above, held in runs:
            index.add(WorkerId(f"n1/1/{worker}"), above, held)
    pairs = sum(index.counts.values()) - len(index.index)
    more = resident_bytes() - before
    print(f"memory: {pairs:,} more (worker, block) in {more / 2**20:,.0f} MiB, {more / pairs:.1f} bytes each")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096
