"""The collective side: every aligned group of the lattice, created once when the ranks start, selected ever after.

NCCL or gloo is decided here and nowhere else. On CPU it is gloo, over the loopback interface (`settings.rank_environment`).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shared.model.lattice import Group, lattice

BACKEND = "gloo"
# Only a bound for a frontend that has gone silent as well: it ends its ranks long before.
COLLECTIVE_LIMIT = timedelta(hours=1)


class Groups:
    """One rank's membership in the groups of its node. Creating it is collective: all ranks must do it at once."""

    def __init__(self, rank: int, ranks: int, store_path: str) -> None:
        store = dist.FileStore(store_path, ranks)  # type: ignore[attr-defined]
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_LIMIT)
        self._rank = rank
        self._groups = {
            group: dist.new_group(list(group.ranks), timeout=COLLECTIVE_LIMIT)
            for group in lattice(ranks)
            if group.degree > 1
        }

    def has(self, group: Group) -> bool:
        """Whether this rank can serve in the group."""
        return self._rank in group.ranks and (group.degree == 1 or group in self._groups)

    def all_gather(self, group: Group, local: Tensor) -> Tensor:
        """(degree, *local.shape), in rank order. Every rank of the group gives the same shape, of at least one dimension."""
        gathered = local.new_empty((group.degree * local.shape[0], *local.shape[1:]))
        dist.all_gather_single(gathered, local.contiguous(), group=self._groups[group])
        return gathered.view(group.degree, *local.shape)

    def exchange(self, group: Group, for_ranks: Tensor) -> Tensor:
        """Row r of `for_ranks` goes to rank r of the group; row r of the result came from it. Shapes as in `all_gather`."""
        received = torch.empty_like(for_ranks)
        dist.all_to_all_single(received, for_ranks.contiguous(), group=self._groups[group])
        return received
