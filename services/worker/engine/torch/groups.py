"""The collective side: every aligned group of the lattice, created once when the ranks start, selected ever after.

NCCL where each rank has a GPU of its own, else gloo (`devices.backend_of`), over the loopback interface
(`settings.rank_environment`). gloo takes host memory only: ranks that share a GPU exchange through pinned memory.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.worker.engine.torch.devices import backend_of, device_of
from shared.model.lattice import Group, lattice

# Only a bound for a frontend that has gone silent as well: it ends its ranks long before.
COLLECTIVE_LIMIT = timedelta(hours=1)


class Groups:
    """One rank's membership in the groups of its node. Creating it is collective: all ranks must do it at once."""

    def __init__(self, rank: int, ranks: int, meeting: int, gpus: int) -> None:
        """`meeting` is the descriptor of an empty file that all ranks have."""
        store = dist.FileStore(f"/proc/self/fd/{meeting}", ranks)  # type: ignore[attr-defined]
        backend = backend_of(ranks, gpus)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=COLLECTIVE_LIMIT,
            # NCCL connects a group when it is first used, in the middle of a step, unless it knows the device here.
            device_id=torch.device(device_of(rank, gpus)) if backend == "nccl" else None,
        )
        self._rank, self._staged = rank, backend == "gloo" and gpus > 0
        # The group of all ranks is there already: each group more is a thread of gloo's that wakes a hundred times a second,
        # or a communicator of NCCL's with buffers on every GPU.
        self._groups = {
            group: dist.group.WORLD
            if group.degree == ranks
            else dist.new_group(list(group.ranks), timeout=COLLECTIVE_LIMIT)
            for group in lattice(ranks)
            if group.degree > 1
        }
        # NCCL makes a group's connections with the first collective of each kind: now, and not in a step after a switch.
        for group in self._groups:
            if rank in group.ranks:
                self.exchange(group, self.all_gather(group, torch.zeros(1, device=device_of(rank, gpus))))

    def has(self, group: Group) -> bool:
        """Whether this rank can serve in the group."""
        return self._rank in group.ranks and (group.degree == 1 or group in self._groups)

    def all_gather(self, group: Group, local: Tensor) -> Tensor:
        """(degree, *local.shape), in rank order. Every rank of the group gives the same shape, of at least one dimension."""
        gathered = local.new_empty((group.degree * local.shape[0], *local.shape[1:]))
        self._run(dist.all_gather_single, group, gathered, local.contiguous())
        return gathered.view(group.degree, *local.shape)

    def exchange(self, group: Group, for_ranks: Tensor) -> Tensor:
        """Row r of `for_ranks` goes to rank r of the group; row r of the result came from it. Shapes as in `all_gather`."""
        sent = for_ranks.contiguous()  # a collective fills memory, whatever strides a tensor shows it with
        received = torch.empty_like(sent)
        self._run(dist.all_to_all_single, group, received, sent)
        return received

    def _run(self, collective: Callable[..., Any], group: Group, received: Tensor, sent: Tensor) -> None:
        if not self._staged:
            collective(received, sent, group=self._groups[group])
            return
        out, back = (torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in (sent, received))
        out.copy_(sent)  # waits for the device, which is what gloo cannot do
        collective(back, out, group=self._groups[group])
        received.copy_(back, non_blocking=True)
