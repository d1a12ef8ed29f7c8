"""Reads over NIXL, and what is left of one that has failed."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from services.worker.engine.torch.kv_layout import KvLayout
from services.worker.engine.torch.kv_memory import KvMemory
from services.worker.engine.torch.wire import NOT_INSTALLED, Piece, Unreachable, Wire

nixl = pytest.importorskip("nixl_cu12._api")

LAYOUT = KvLayout("float32", layers=2, kv_heads=1, head_dim=4, block_tokens=8, blocks=4)


def pool(value: float) -> KvMemory:
    file = os.memfd_create("test")
    os.ftruncate(file, LAYOUT.file_bytes)
    memory = KvMemory(LAYOUT, [file])
    os.close(file)
    memory._pools_BL2TGD[0].fill_(value)
    return memory


def lend(pipe: Connection) -> None:
    """Another node, until it is killed."""
    memory, scratch = pool(7.0), torch.zeros(1, dtype=torch.int64)  # both stay as long as they are registered
    wire = Wire("source", "test", memory, [], scratch)
    pipe.send(wire.access)
    while not pipe.poll(0.001):
        wire.progress()


def read(wire: Wire, memory: KvMemory, access: str) -> None:
    """All of the slots."""
    peer = wire.peer(access)
    pieces = [Piece(memory.slot_bases[0], peer.access.slots[0], LAYOUT.slots_bytes)]
    handle = wire.read(peer, pieces)
    while not wire.done(peer, handle):
        pass


@pytest.mark.parametrize("called_back", [True, False])
def test_a_read_from_a_dead_node_holds_nothing_or_says_that_it_may_write(
    monkeypatch: pytest.MonkeyPatch, *, called_back: bool
) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    source = context.Process(target=lend, args=(theirs,), daemon=True)
    source.start()
    memory, scratch = pool(0.0), torch.zeros(1, dtype=torch.int64)
    wire = Wire("reader", "test", memory, [], scratch)
    access = pipe.recv()
    read(wire, memory, access)
    assert memory._pools_BL2TGD[0].eq(7.0).all()
    source.kill()
    source.join()
    release, released = wire._agent.release_xfer_handle, []

    def released_if_it_can_be(handle: object) -> None:
        released.append(handle)
        if not called_back:
            raise wire._errors[0]("still under way")
        release(handle)

    monkeypatch.setattr(wire._agent, "release_xfer_handle", released_if_it_can_be)
    with pytest.raises(Unreachable) as failed:
        read(wire, memory, access)
    assert len(released) == 1
    assert failed.value.writing is not called_back


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ModuleNotFoundError('no module')", NOT_INSTALLED),
        ("ImportError('libcudart.so.12: cannot open')", "cannot be loaded: libcudart.so.12: cannot open"),
    ],
)
def test_a_node_without_nixl_reaches_nobody_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, said: str
) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nixl_cu12"]:
        monkeypatch.delitem(sys.modules, name)
    wire = Wire("reader", "test", pool(0.0), [], torch.zeros(1, dtype=torch.int64))
    assert wire.access == ""
    with pytest.raises(Unreachable, match=said):
        wire.peer("anybody")
