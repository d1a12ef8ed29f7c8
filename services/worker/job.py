"""One accepted assignment: an attempt of a request at a worker of this node."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shared.contracts.commands import Assign
from shared.contracts.events import AbortReason
from shared.contracts.ids import BlockId, RequestId, WorkerId, unpack_block_ids


class JobKey(NamedTuple):
    """What a repeated or late command is told apart by."""

    request: RequestId
    attempt: int

    @property
    def engine_id(self) -> RequestId:
        """The engine's name for it. Two attempts of a request may be in one engine for a moment; their pins are not the
        same pins."""
        return RequestId(f"{self.request}/{self.attempt}")


class Stage(Enum):
    """`QUEUED` → `RUNNING` (its prefill) → `STREAMING` (first token out, KV pinned or decoding) → `ENDED`.

    An assignment that never streams ends in `prefill-aborted`; one that does has had its `prefill-completed`.
    """

    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Job:
    """`accepted_ns` is monotonic. `stop` is why a running prefill is to end at its next step boundary."""

    assign: Assign
    accepted_ns: int
    stage: Stage = Stage.QUEUED
    stop: AbortReason | None = None

    @property
    def key(self) -> JobKey:
        return JobKey(self.assign.request, self.assign.attempt)

    @property
    def worker(self) -> WorkerId:
        return self.assign.worker

    @property
    def chain(self) -> tuple[BlockId, ...]:
        """The ids of the prompt's whole blocks. A bad length has been refused before there was a job."""
        return tuple(unpack_block_ids(self.assign.block_ids))
