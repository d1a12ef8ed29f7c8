"""How a node's facts reach the log: under the request they belong to, with its trace, caused by its assignment."""

from collections.abc import Sequence

from services.worker.job import Job
from shared.contracts.envelope import Envelope, EventData
from shared.runtime.appending import Origin
from shared.runtime.outbox import Outbox


class Recorder:
    """One node's outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox

    def record(self, facts: Sequence[EventData], job: Job | None = None) -> list[Envelope]:
        """Fold and enqueue `facts`; none is fine. Errors: OutboxFull, which ends the process: jobs were accepted only
        while there was room, so a full outbox is a broken belief."""
        if not facts:
            return []
        if job is None:
            return self.outbox.record(facts)
        return self.outbox.record(facts, Origin(job.assign.request, job.assign.decision, job.assign.traceparent))
