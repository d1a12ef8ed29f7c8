"""What the fold of loads keeps of one open request: where it is, and who had it before."""

from dataclasses import dataclass, field

from services.router.lines import Assignment
from shared.contracts.events import RequestRedirected
from shared.contracts.ids import NodeId, Source, WorkerId, node_of


@dataclass(slots=True)
class OpenRequest:
    """A received request without an end. `worker` is None before the first assignment and between a redirection and the
    next one; `assignment` is what it reserves there, None when the node has ended in the meantime. Where one that
    is `placed_only` runs is not this router's affair. `refused_by` had it and gave it back; the agents of nodes in `silent` did
    not answer, to an assignment that had seen so much of the log."""

    source: Source
    prompt_tokens: int
    max_tokens: int
    placed_only: bool = False
    attempt: int = 0
    worker: WorkerId | None = None
    assignment: Assignment | None = None
    refused_by: tuple[WorkerId, ...] = ()
    silent: dict[NodeId, int] = field(default_factory=dict)

    def avoid(self, data: RequestRedirected) -> None:
        """Fold who is not asked again while there is somebody else. Call it before the reservation is freed.

        A node that was silent has been heard of when it gives the request back, and when its incarnation ends behind what the
        assignment had seen (rule 2 of `loads.py`): the next one was never asked."""
        node = node_of(data.worker)
        if data.node_silent:
            if self.assignment is not None:
                self.silent[node] = self.assignment.seen_seq
            return
        self.silent.pop(node, None)
        if data.reason != "rebalanced":
            self.refused_by += (data.worker,)

    def outlives(self, node: NodeId, seq: int) -> None:
        """Fold that an incarnation of the node ended at `seq`."""
        if self.silent.get(node, seq) < seq:
            del self.silent[node]
