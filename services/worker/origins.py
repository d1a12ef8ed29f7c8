"""What a node's facts belong to, in the log: a request and the decision behind its assignment, an operation that was ordered,
or an epoch of the node."""

from services.worker.job import Job
from shared.contracts.ids import NodeId
from shared.runtime.appending import Origin


def of_job(job: Job) -> Origin:
    """What comes of an assignment."""
    return Origin(job.assign.request, job.assign.decision, job.assign.traceparent)


def of_operation(operation: str) -> Origin:
    """What comes of a copy or an eviction that somebody ordered."""
    return Origin(correlation=operation)


def of_epoch(node: NodeId, epoch: int) -> Origin:
    """What leads to an epoch, as the controller names it."""
    return Origin(correlation=f"{node}/{epoch}")
