"""What the workers are busy with, as far as a change of composition disturbs it: running prefills and reused blocks."""

from dataclasses import dataclass, field

from shared.contracts.envelope import Stored
from shared.contracts.events import EpochCommitted, NodeDeclaredLost, NodeLost, PrefillCompleted, WindowClosed
from shared.contracts.ids import NodeId, WorkerId, node_of
from shared.model import backlog as backlog_model
from shared.model.backlog import Backlog

HEARD = frozenset({PrefillCompleted, NodeLost, NodeDeclaredLost, EpochCommitted, WindowClosed})
"""What says something of reuse."""


@dataclass(slots=True)
class Activity:
    """State of the fold; `evolve` is its only writer. `reused_tokens` counts prompt tokens that each worker had cached; the
    counts are halved with every window, so the last few minutes speak."""

    backlog: Backlog = field(default_factory=Backlog)
    reused_tokens: dict[WorkerId, int] = field(default_factory=dict)

    def drain_us(self, worker: WorkerId, now_ns: int) -> int:
        """How long what runs there will take to end: the rest of its prediction, or a quarter of the time it has taken if
        that is more. A worker that takes prompts in chunks may be done sooner."""
        running = [each for each in self.backlog.prefills.values() if each.worker == worker]
        started = [each.started_ns for each in running if each.started_ns is not None]
        if not started:
            return 0
        service_us = sum(each.service_us for each in running if each.started_ns is not None)
        elapsed_us = max(0, now_ns - min(started)) // 1_000
        return max(service_us - elapsed_us, elapsed_us // 4)


def evolve(activity: Activity, stored: Stored) -> None:
    """Fold one event."""
    backlog_model.evolve(activity.backlog, stored)
    if type(stored.data) not in HEARD:
        return
    match stored.data:
        case PrefillCompleted() as data:
            reused = activity.reused_tokens.get(data.worker, 0) + data.cached_own_tokens
            if reused:
                activity.reused_tokens[data.worker] = reused
        case NodeLost() | NodeDeclaredLost() | EpochCommitted() as data:
            _forget_reuse(activity, data.node)
        case WindowClosed():
            halved = {worker: tokens // 2 for worker, tokens in activity.reused_tokens.items()}
            activity.reused_tokens = {worker: tokens for worker, tokens in halved.items() if tokens}
        case _:
            pass


def _forget_reuse(activity: Activity, node: NodeId) -> None:
    for worker in [each for each in activity.reused_tokens if node_of(each) == node]:
        del activity.reused_tokens[worker]
