"""What the global trie costs: memory per node, and the time of lookups, demand, scans and a restart.

`python -m bench.cachemgr --nodes 10000000`. Workers of every degree hold prompts of 256 blocks that share their first 64 with
fifteen others, and every eighth prompt is held twice. With `--bushy` prompts have 4 blocks and share two, and every block was
asked for at two degrees: the most that a node can take, in memory and in a snapshot.

A restart goes on from a snapshot of the state; without one, a new process folds a full report of every worker. Times are of the
processor; those of a snapshot are of a copy of the process, and by the wall clock for the process itself.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import typer

from bench.facts import Facts
from services.cachemgr import decider, freezing
from services.cachemgr.decider import State
from services.cachemgr.freezing import Folded
from services.worker import cache_events
from services.worker.engine.protocol import Resident
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlockRun,
    BlocksEvicted,
    BlocksStored,
    CacheScanCompleted,
    CommittedWorker,
    EpochCommitted,
)
from shared.contracts.ids import BlockId, NodeId, WorkerId, worker_id
from shared.model.cost import load_coefficients
from shared.model.lattice import groups_of
from shared.runtime.process_copy import ProcessCopy
from shared.runtime.projection import Reached

COMPOSITION = (1, 1, 2, 4)
SIBLINGS = 16
TOUCHED = 2_000

Run = tuple[BlockId | None, tuple[BlockId, ...]]


class Shape(NamedTuple):
    """Blocks of a prompt, and how many of them its siblings share."""

    prompt: int
    shared: int


LONG, BUSHY = Shape(256, 64), Shape(4, 2)


class Bench:
    """A cache manager's folded state, of nodes that have their first epoch."""

    def __init__(self, pool_nodes: int) -> None:
        self.state: State = decider.initial(load_coefficients("qwen3_30b_a3b_h20"))
        self.workers: list[WorkerId] = []
        self._facts = Facts()
        for index in range(pool_nodes):
            node = NodeId(f"n{index}")
            workers = tuple(
                CommittedWorker(
                    worker=worker_id(node, 1, group.first_rank),
                    degree=group.degree,
                    first_rank=group.first_rank,
                    capacity_us=1,
                )
                for group in groups_of(COMPOSITION)
            )
            self.workers += [each.worker for each in workers]
            self.tell(EpochCommitted(node=node, epoch=1, composition=COMPOSITION, workers=workers))

    def tell(self, *facts: EventData) -> None:
        for fact in facts:
            decider.evolve(self.state, self._facts.stored(fact, 0))


def main(
    nodes: Annotated[int, typer.Option(min=10_000)] = 1_000_000,
    pool_nodes: int = 8,
    bushy: Annotated[bool, typer.Option(help="short branches, all asked for")] = False,
) -> None:
    """Fill a trie and time it."""
    gc.disable()  # as after `gc.freeze`: a collection of millions of live objects finds nothing and takes seconds
    bench = Bench(pool_nodes)
    state, workers = bench.state, bench.workers
    shape = BUSHY if bushy else LONG
    holdings = _holdings(workers, nodes, shape)
    idle_bytes = resident_bytes()
    # What a report carries is built and thrown away piece by piece: ids of the state are its own.
    parts, seconds, report_bytes = 0, 0.0, 0
    for worker in workers:
        reports = cache_events.report(worker, 1, 0, Resident(tuple(holdings(worker))))
        report_bytes += sum(len(each.model_dump_json()) for each in reports)
        began_s = time.process_time()
        bench.tell(*reports)
        seconds += time.process_time() - began_s
        parts += len(reports)
    if bushy:
        _ask_for_everything(bench)
    found, used = len(state.trie.nodes), resident_bytes() - idle_bytes
    print(
        f"{found:,} nodes, {state.trie.copies:,} (worker, block): {used / 2**30:.2f} GiB, {used / found:.0f} bytes a node"
    )
    print(
        f"restart from reports: {parts} parts, {report_bytes / 2**20:.0f} MiB, folded in {seconds:.1f} s, "
        f"{seconds / state.trie.copies * 1e9:.0f} ns a block"
    )
    _snapshot(state)
    _timed(bench, holdings, shape)


def _ask_for_everything(bench: Bench) -> None:
    """Each prompt as often as chance wants before and after each of two scans, so that hardly two have the same statistics."""
    chance, trie = Random(1), bench.state.trie
    prompts = [each for each in trie.nodes.values() if not each.children]
    for scan in (1, 2, 3):
        for node in prompts:
            times, missed_s = chance.randint(1, 9), chance.random()
            for each in node.upwards():
                trie.noticed(each)
                trie.missed(each, 8, missed_s)
                for _ in range(times):
                    trie.accessed(each, 4)
        trie.scanned(scan)


def _snapshot(state: State) -> None:
    """Written by a copy of this process, as a leader does it, and read again."""
    folded = Folded(state, Reached(0, 1, 0, {}, {}), state.coefficients)

    async def written() -> tuple[bytes, float]:
        began_s = time.perf_counter()
        copy = ProcessCopy(partial(freezing.pieces, folded))
        stood_still_s = time.perf_counter() - began_s
        async with aclosing(copy) as told:
            return b"".join([each async for each in told]), stood_still_s

    before_s = os.times().children_user + os.times().children_system
    raw, stood_still_s = asyncio.run(written())
    took_s = os.times().children_user + os.times().children_system - before_s
    print(
        f"snapshot: {len(raw) / 2**20:.0f} MiB, {len(raw) / len(state.trie.nodes):.1f} bytes a node, written in {took_s:.1f} s "
        f"of a copy; the process stood still for {stood_still_s * 1e3:.0f} ms"
    )
    began_s = time.process_time()
    found = len(freezing.read(raw).state.trie.nodes)
    seconds = time.process_time() - began_s
    print(f"restart from it: {found:,} nodes in {seconds:.1f} s, {seconds / found * 1e9:.0f} ns a node")


def _timed(bench: Bench, holdings: Callable[[WorkerId], Iterator[Run]], shape: Shape) -> None:
    state, workers = bench.state, bench.workers
    chains = [_path(state, blocks[-1]) for _, blocks in list(holdings(workers[0]))[-200:]]
    _show("lookup of a prompt's path, any holder", lambda: [state.trie.matched(chain) for chain in chains], len(chains))
    _show("lookup at every worker", lambda: [state.holders.matched(chain) for chain in chains], len(chains))
    hot = [block for chain in chains for block in chain][:TOUCHED]
    _show("access counted", partial(_access, state, hot), len(hot))
    _show("missed counted", partial(_miss, state, hot), len(hot))
    _show(f"a scan with {len(hot):,} hot nodes, per hot node", lambda: decider.scan(state), len(hot))
    scan = CacheScanCompleted(
        scan=1, to_seq=0, nodes=0, holders=0, inter_candidates=0, intra_candidates=0, reclaim_candidates=0
    )
    _show("its decay, per hot node", lambda: bench.tell(scan), len(hot))
    for _ in range(60):
        bench.tell(scan)
    _show("a scan with nothing hot", lambda: decider.scan(state), 1)
    _changes(bench, chains, shape)
    began_s = time.process_time()
    gone = state.holders.index.clear(workers[0])
    state.trie.dropped(workers[0], gone)
    print(f"{'a worker lost, per block':44} {(time.process_time() - began_s) / len(gone) * 1e6:10.2f} µs")


def _changes(bench: Bench, chains: list[list[BlockId]], shape: Shape) -> None:
    """What the worker had of its own in each prompt goes, and comes back."""
    worker, numbers = bench.workers[0], count(1)
    chains = [each for each in chains if len(each) == shape.prompt]
    tails = [chain[shape.shared :] for chain in chains]
    blocks = sum(map(len, tails))
    gone = [
        BlocksEvicted(
            worker=worker, incarnation=1, number=next(numbers), cause="pressure", block_ids=b"".join(tail[::-1])
        )
        for tail in tails
    ]
    back = [
        BlocksStored(
            worker=worker,
            incarnation=1,
            number=next(numbers),
            cause="fetch",
            first_depth=shape.shared,
            blocks=len(tail),
            runs=(BlockRun(parent=chain[shape.shared - 1], block_ids=b"".join(tail)),),
        )
        for chain, tail in zip(chains, tails, strict=True)
    ]
    _show("blocks evicted, per block", lambda: bench.tell(*gone), blocks)
    _show("blocks stored, per block", lambda: bench.tell(*back), blocks)


def _holdings(workers: list[WorkerId], nodes: int, shape: Shape) -> Callable[[WorkerId], Iterator[Run]]:
    """What each worker holds, as runs: made anew whenever it is asked for, and always the same."""
    own = SIBLINGS * (shape.prompt - shape.shared) + shape.shared
    families = max(1, nodes // own // len(workers))

    def runs(of: int, family: int, part: int) -> Iterator[Run]:
        chance = Random(f"{of} {family}")
        shared = tuple(BlockId(chance.randbytes(16)) for _ in range(shape.shared))
        yield None, shared
        for number in range(SIBLINGS):
            rest = tuple(BlockId(chance.randbytes(16)) for _ in range(shape.prompt - shape.shared))
            if number % part == 0:
                yield shared[-1], rest

    def holdings(worker: WorkerId) -> Iterator[Run]:
        index = workers.index(worker)
        for family in range(families):
            yield from runs(index, family, 1)
            yield from runs((index + 1) % len(workers), family, 8)

    return holdings


def _path(state: State, block: BlockId) -> list[BlockId]:
    return state.trie.nodes[block].path


def _access(state: State, blocks: list[BlockId]) -> None:
    for block in blocks:
        state.trie.accessed(state.trie.nodes[block], 4)


def _miss(state: State, blocks: list[BlockId]) -> None:
    for block in blocks:
        state.trie.missed(state.trie.nodes[block], 8, 0.1)


def _show(what: str, work: Callable[[], object], times: int) -> None:
    began_s = time.process_time()
    work()
    print(f"{what:44} {(time.process_time() - began_s) / times * 1e6:10.2f} µs")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


if __name__ == "__main__":
    typer.run(main)
