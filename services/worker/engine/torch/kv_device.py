"""Pools in GPU memory, of slots or of contexts: each allocated by the rank that owns it, and opened by whoever else of the node
needs it.

A `PoolHandle` is what torch itself hands from process to process when it shares a CUDA tensor (CUDA IPC), field by field and
without the pickle that it is wrapped in there. Whoever opens a pool names the same memory; nothing is copied. A process
cannot open what is its own.

Pools stay until their ranks end, all of them together, so that nobody reads memory that was given back.
"""

import torch
from torch import Tensor

from services.worker.engine.torch.move_messages import PoolHandle


def allocate(size: int, device: torch.device) -> Tensor:
    """The slots or the contexts of one rank, as bytes. torch.OutOfMemoryError if the device has no room for them."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def share(pool: Tensor) -> PoolHandle:
    """For the other processes of this node."""
    shared = pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    device, handle, size, offset, counter, counter_offset, event, waits = shared
    return PoolHandle(device, handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), waits)


def opened(shared: PoolHandle) -> Tensor:
    """The bytes of another process's pool."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(
        shared.device,
        bytes.fromhex(shared.handle),
        shared.size_bytes,
        shared.offset_bytes,
        bytes.fromhex(shared.counter),
        shared.counter_offset,
        bytes.fromhex(shared.event),
        shared.waits,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
