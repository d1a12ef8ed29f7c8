"""What moving KV costs, each way beside a plain memcpy of the same blocks: `python -m bench.kv_movement [MODEL_DIR]`.

All ways take turns in every round, so that a busy machine slows all of them: the ratios are the result. First the ways
themselves, in one process that has mapped its own pools and a second process's; then whole plans between two torch engines,
as the agent has them carried out, if a model directory is given: between their GPUs where there are any.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.copy_plan import CopyPlan, Source
from services.worker.engine.protocol import PrefillItem, PrefillStep
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.contexts import Contexts
from services.worker.engine.torch.destinations import IntoContext
from services.worker.engine.torch.devices import visible_gpus
from services.worker.engine.torch.engine import TorchEngine
from services.worker.engine.torch.kv_layout import ContextLayout, KvLayout
from services.worker.engine.torch.kv_memory import KvMemory
from services.worker.engine.torch.move_messages import BlockMove, ContextRef
from services.worker.engine.torch.mover import CHUNK_BYTES, IDLE_TICK_S
from services.worker.engine.torch.settings import TorchSettings
from services.worker.engine.torch.wire import Piece, Wire
from services.worker.engine.torch.zygote import Zygote
from shared.contracts.ids import NodeId, RequestId
from shared.model.blocks import block_chain
from shared.model.lattice import Group

LAYOUT = KvLayout("bfloat16", layers=30, kv_heads=3, head_dim=64, block_tokens=64, blocks=128)
"""SmolLM2-135M at 64 tokens a block: 1.4 MiB each, 180 MiB a pool."""

MOVED_BLOCKS = 96
ROUNDS = 9


def new_memory(seed: int) -> KvMemory:
    """A pool of its own, filled."""
    file = os.memfd_create("bench-kv")
    os.ftruncate(file, LAYOUT.file_bytes)
    memory = KvMemory(LAYOUT, [file])
    pool = memory._pools_BL2TGD[0]
    pool.view(torch.int16).random_(generator=torch.Generator().manual_seed(seed))
    return memory


def lend(pipe: Connection) -> None:
    """The other process: registered memory, and a look now and then, as an idle mover does."""
    memory, scratch = new_memory(1), torch.zeros(1, dtype=torch.int64)  # both stay as long as they are registered
    wire = Wire("bench-source", "bench", memory, [], scratch)
    pipe.send((wire.access, wire.detail))
    while not pipe.poll(IDLE_TICK_S):
        wire.progress()


def ways(access: str) -> dict[str, Callable[[], None]]:
    """Each copies the same number of scattered blocks into slots of this process."""
    memory = new_memory(2)
    layout = ContextLayout.of(LAYOUT, MOVED_BLOCKS * LAYOUT.block_tokens, 1)
    file = os.memfd_create("bench-context")
    os.ftruncate(file, layout.file_bytes)
    contexts = Contexts(layout, file)
    wire = Wire(
        "bench-reader", "bench", memory, [(contexts.base, layout.file_bytes)], torch.zeros(1, dtype=torch.int64)
    )
    peer, size = wire.peer(access), LAYOUT.block_bytes
    order = np.random.default_rng(1).permutation(LAYOUT.blocks)[:MOVED_BLOCKS].tolist()
    private = torch.zeros((MOVED_BLOCKS, size), dtype=torch.uint8)
    target = torch.zeros_like(private)
    here_and_there = memory.slot_bases[0], peer.access.slots[0]
    chunk = max(1, CHUNK_BYTES // size)
    into_context = IntoContext(memory, [contexts])
    moves = [BlockMove(SlotRef(0, index, 0), ContextRef(0, 0, depth), 0, None) for depth, index in enumerate(order)]

    def memcpy() -> None:
        for number in range(MOVED_BLOCKS):
            target[number] = private[number]

    def within_the_node() -> None:
        for number, index in enumerate(order):
            memory.block(SlotRef(0, (index + number) % LAYOUT.blocks, 0)).copy_(memory.block(SlotRef(0, index, 0)))

    def hand_off() -> None:
        for move in moves:
            into_context.block(move).copy_(memory.block(move.source))

    def read(pieces: list[Piece]) -> None:
        handle = wire.read(peer, pieces)
        while not wire.done(peer, handle):
            pass

    def nixl() -> None:
        here, there = here_and_there
        for start in range(0, MOVED_BLOCKS, chunk):
            offsets = [LAYOUT.slot_offset(index) for index in order[start : start + chunk]]
            read([Piece(here.after(offset), there.after(offset), size) for offset in offsets])

    def hand_off_by_nixl() -> None:
        _, there = here_and_there
        for start in range(0, MOVED_BLOCKS, chunk):
            read(
                [
                    Piece(part.here, there.after(LAYOUT.slot_offset(move.source.index) + part.offset), part.bytes)
                    for move in moves[start : start + chunk]
                    for part in into_context.parts(move)
                ]
            )

    return {
        "memcpy, private memory": memcpy,
        "within the node (mapped pool to pool)": within_the_node,
        "hand-off (mapped pool to a decode context)": hand_off,
        "between nodes (NIXL read, other process)": nixl,
        "hand-off between nodes (NIXL read to a decode context)": hand_off_by_nixl,
    }


def compare() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    source = context.Process(target=lend, args=(theirs,), daemon=True)
    source.start()
    theirs.close()  # so that a source that ends ends the wait for it
    access, detail = pipe.recv()
    if not access:
        sys.exit(detail)
    measured = ways(access)
    gb = MOVED_BLOCKS * LAYOUT.block_bytes / 1e9
    rates: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(ROUNDS + 1):
        for name, move in measured.items():
            start_s = time.perf_counter()
            move()
            rates[name].append(gb / (time.perf_counter() - start_s))
    pipe.send("done")
    source.join()
    base = statistics.median(rates["memcpy, private memory"][1:])  # the first round touches pages
    for name, each in rates.items():
        median = statistics.median(each[1:])
        sys.stdout.write(f"{name:44} {median:6.2f} GB/s, {median / base:5.2f} of the memcpy\n")


async def whole_plans(model_dir: Path) -> None:
    """Two nodes: a prompt computed at degree 1, copied to degree 2, again and again."""
    zygote = Zygote()
    settings = TorchSettings(model_dir, prefill_ranks=2, decode_ranks=0, copy_bytes_per_s=1e12, gpus=visible_gpus())
    source, node = TorchEngine(settings, zygote), TorchEngine(settings, zygote)
    try:
        for engine in (source, node):
            await engine.start()
        await source.adopt(1, (1, 1))
        await node.adopt(1, (2,))
        tokens = np.random.default_rng(1).integers(0, 40_000, 2_048).astype(np.uint32)
        chain = tuple(block_chain(tokens, settings.block_tokens, b"k" * 32))
        await source.prefill(PrefillStep(1, Group(0, 1), (PrefillItem(RequestId("r"), tokens, chain),)))
        pinned = await source.pin("bench", chain)
        sources = tuple(Source(each.slot, NodeId("source")) for each in pinned.sources if each is not None)
        access = {NodeId("source"): pinned.access}
        for number in range(ROUNDS):
            plan = CopyPlan(f"copy {number}", 1, Group(0, 2), None, chain, sources, 30.0, access)
            copied = await node.copy_blocks(plan)
            if copied.failure is not None:
                sys.exit(f"plan {number}: {copied.failure} after {len(copied.blocks)} blocks: {copied.detail}")
            size = f"{len(copied.blocks)} blocks, {copied.bytes / 1e6:.0f} MB"
            rate = f"{copied.bytes / copied.seconds / 1e9:.2f} GB/s"
            sys.stdout.write(f"plan {number}: {size}, {copied.seconds * 1e3:.1f} ms, {rate}\n")
            await node.evict(Group(0, 2), chain)
    finally:
        for engine in (source, node):
            await engine.close()
        zygote.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.kv_movement")
    parser.add_argument("model_dir", type=Path, nargs="?")
    model_dir = parser.parse_args().model_dir
    torch.set_num_threads(1)
    compare()
    if model_dir is not None:
        asyncio.run(whole_plans(model_dir))
