"""Prefill/decode disaggregation across a switch: decode servers are told nothing.

Every rank keeps the registration of the launch: its unit is a DP rank, with no context parallelism. A decode server
picks the unit `room mod units`, as ever. KV is whole on every rank of a group, so the unit that it picked sends, and
its mates send nothing.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_parallel


class Bystander:
    """The KV manager as a rank sees it that sends nothing for one request."""

    is_dummy_cp_rank = True

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def choose_sender(
    original: Callable[..., None],
    sender: Any,
    mgr: Any,
    bootstrap_addr: str,
    bootstrap_room: int,
    *more: Any,
    **named: Any,
) -> None:
    """Around `CommonKVSender.__init__`, which is called with these names as well as without."""
    parallel = get_parallel()
    if parallel.attn_cp_size > 1 and bootstrap_room % parallel.num_dp_ranks != mgr.attn_dp_rank:
        mgr = Bystander(mgr)
    original(sender, mgr, bootstrap_addr, bootstrap_room, *more, **named)
