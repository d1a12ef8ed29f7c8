"""Every object of a scheduler process that remembers which ranks compute together, made to think of another group.

`ParallelContext` is what most of SGLang asks at each call; the rest has kept an answer. Not rebound, as the launch's
answers are the right ones there: `num_dp_ranks`, `attn_dp_enabled`, the KV manager's registration, publishers of KV
events and load.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.cp import base as strategies
from sglang.srt.runtime_context import get_parallel

from services.worker.engine.sglang.plugin.places import Place
from shared.model.lattice import DEGREES

logger = logging.getLogger(__name__)


def units() -> int:
    """Of this server."""
    parallel = get_parallel()
    return int(parallel.tp_size // parallel.attn_tp_size)


def unit() -> int:
    """Of this rank."""
    parallel = get_parallel()
    return int(parallel.tp_rank // parallel.attn_tp_size)


class Groups:
    """This rank's group of each width. Kept for the life of the process: custom operators find groups by weak
    references."""

    def __init__(self) -> None:
        self.of_degree: dict[int, Any] = {}
        self._muted: Any = None

    def create(self, _result: object, *_: object, **__: object) -> None:
        """After `initialize_model_parallel`: every group that any composition may need. Making one is collective over
        the world, so all ranks make all of them in one order, and before memory is measured."""
        parallel, world = get_parallel(), parallel_state.get_world_group()
        tp, count = parallel.attn_tp_size, units()
        if parallel.attn_cp_size != 1:
            raise RuntimeError(
                "launch with --attn-cp-size 1: a unit that is part of a group cannot be left alone later"
            )
        backend = dist.get_backend(world.device_group)
        self.of_degree[1] = parallel_state.get_attn_cp_group()
        for degree in DEGREES:
            if 1 < degree <= count and count % degree == 0:
                ranks = [
                    [(first + member) * tp + rank for member in range(degree)]
                    for first in range(0, count, degree)
                    for rank in range(tp)
                ]
                group = parallel_state.init_model_parallel_group(
                    ranks,
                    world.local_rank,
                    backend,
                    use_pynccl=backend == "nccl",
                    use_custom_allreduce=False,
                    group_name=f"vertumnus_cp{degree}",
                )
                self._warm(group)
                self.of_degree[degree] = group
        logger.info("vertumnus: groups of %s units are ready", sorted(self.of_degree))

    def bind(self, scheduler: Any, place: Place) -> None:
        """Make this rank a member of the place's group. Local, and fails only for a place that SGLang does not accept."""
        group = self.of_degree[place.group.degree]
        get_parallel().override_permanently(
            attn_dp_size=place.dp_size,
            attn_dp_rank=place.dp_rank,
            attn_cp_size=place.group.degree,
            attn_cp_rank=place.cp_rank,
            attn_cp_group=group,
            moe_dp_group=group,
        )
        strategies._STRATEGY = None  # made again, for the new width, by who asks next
        scheduler.attn_cp_group, scheduler.attn_cp_cpu_group = group, group.cpu_group
        scheduler.tree_cache.attn_cp_group = group.cpu_group
        self._mute(scheduler, not place.leads)

    def _warm(self, group: Any) -> None:
        """The first collective of a group makes its connections: now, and not in the first merge."""
        there = torch.zeros(1, device=group.device)
        dist.all_gather([torch.empty_like(there) for _ in range(group.world_size)], there, group=group.device_group)

    def _mute(self, scheduler: Any, mute: bool) -> None:
        """A follower computes everything and answers nobody. Control messages it answers for itself, by another socket."""
        answers = scheduler.ipc_channels.send_to_detokenizer
        if mute and answers.socket is not None:
            self._muted, answers.socket = answers.socket, None
        elif not mute and answers.socket is None and self._muted is not None:
            answers.socket, self._muted = self._muted, None
