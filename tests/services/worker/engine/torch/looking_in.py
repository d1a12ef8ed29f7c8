"""What lies in the memory of rank processes, seen from outside (Linux's /proc): the ranks know nothing of being looked at."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from services.worker.engine.holder import Slot
from services.worker.engine.kv_slots import ref_of
from services.worker.engine.slot_ref import SlotRef
from services.worker.engine.torch.engine import TorchEngine


def _lines(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().splitlines()


class Allocated(NamedTuple):
    """What a switch must not touch: where pools and weights are mapped, every open file and connection (a group is its
    connections), and the threads."""

    mappings: frozenset[str]
    files: frozenset[str]
    threads: frozenset[str]


def allocated(pid: int) -> Allocated:
    mapped = (line for line in _lines(pid, "maps") if "vertumnus-kv" in line or line.endswith(".safetensors"))
    files = frozenset(f"{fd.name} {fd.readlink()}" for fd in Path(f"/proc/{pid}/fd").iterdir())
    return Allocated(frozenset(mapped), files, frozenset(task.name for task in Path(f"/proc/{pid}/task").iterdir()))


def anonymous_bytes(pid: int) -> int:
    """Memory that is neither a file's nor shared."""
    found = next(line for line in _lines(pid, "smaps_rollup") if line.startswith("Anonymous:"))
    return int(found.split()[1]) * 1024


class Pools:
    """The KV pools of an engine."""

    def __init__(self, engine: TorchEngine, maps: list[mmap.mmap]) -> None:
        self._engine, self._maps, self._layout = engine, maps, engine._ranks._layout

    def digest(self, ref: SlotRef) -> bytes:
        start = self._layout.slots_offset + ref.index * self._layout.block_bytes
        return blake2b(self._maps[ref.rank][start : start + self._layout.block_bytes], digest_size=16).digest()

    def retained(self) -> dict[SlotRef, bytes]:
        """Of every slot that is not free: the digest of its content."""
        return {
            ref_of(slot): self.digest(ref_of(slot)) for slot in self._slots() if slot.pins or slot.block is not None
        }

    def blocks(self) -> dict[SlotRef, bytes]:
        """The same of every slot with a whole block, which nobody but an eviction takes away."""
        return {ref_of(slot): self.digest(ref_of(slot)) for slot in self._slots() if slot.block is not None}

    def _slots(self) -> list[Slot]:
        return [slot for slots in self._engine._pool._slots._slots for slot in slots]

    def of(self, request: str) -> list[bytes]:
        """Of each of the request's blocks, in order."""
        reservation = self._engine._pool._reservations[request]  # type: ignore[index]
        return [self.digest(ref) for ref in reservation.slots]


@contextmanager
def pools(engine: TorchEngine) -> Iterator[Pools]:
    maps = []
    for rank in engine._ranks.prefill:
        files = Path(f"/proc/{rank.pid}/fd").iterdir()
        pool = next(fd for fd in files if str(fd.readlink()).startswith(f"/memfd:vertumnus-kv-{rank.rank} "))
        with pool.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        yield Pools(engine, maps)
    finally:
        for each in maps:
            each.close()


def weight_digests(engine: TorchEngine) -> list[bytes]:
    """Of every rank's own view of the weights, private changes included. All views must be equal."""
    digests = []
    for rank in engine._ranks.prefill:
        digest = blake2b()
        with Path(f"/proc/{rank.pid}/mem").open("rb", buffering=0) as memory:
            for line in _lines(rank.pid, "maps"):
                if line.endswith(".safetensors"):
                    start, end = (int(each, 16) for each in line.split()[0].split("-"))
                    memory.seek(start)
                    digest.update(memory.read(end - start))
        digests.append(digest.digest())
    assert len(set(digests)) == 1
    return digests


def ticks(pid: int) -> tuple[int, int]:
    """Processor time so far, in ticks of the kernel, of the thread that computes and of all others."""
    found = {
        task.name: sum(map(int, (task / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    own = found.pop(str(pid))
    return own, sum(found.values())


def turns(pid: int) -> int:
    """How often the thread that computes has given up a processor, or was made to."""
    switches = (line for line in _lines(pid, f"task/{pid}/status") if "ctxt_switches" in line)
    return sum(int(line.split()[1]) for line in switches)
