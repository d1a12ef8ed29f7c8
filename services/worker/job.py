"""One accepted assignment: an attempt of a request at a worker of this node."""

from dataclasses import dataclass, field
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
    """`QUEUED` → `RUNNING` (a step of its prefill) → `STREAMING` (first token out, KV pinned or decoding) → `ENDED`; between
    two chunks it is `QUEUED` again.

    An assignment that never streams ends in `prefill-aborted`; one that does has had its `prefill-completed`.
    """

    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(slots=True)
class Progress:
    """What a job's own steps have done so far. Of a packed step's time it has its share (`step_cost`)."""

    steps: int = 0
    computed_tokens: int = 0
    measured_us: int = 0
    predicted_us: int = 0

    def add(self, computed_tokens: int, measured_us: int, predicted_us: int) -> None:
        """One more step."""
        self.steps += 1
        self.computed_tokens += computed_tokens
        self.measured_us += measured_us
        self.predicted_us += predicted_us


class Fetched(NamedTuple):
    """What came of a job's fetch: `tokens` of its prompt beyond the `own_tokens` that the worker held. `fallback` as in
    `prefill-completed`."""

    own_tokens: int = 0
    tokens: int = 0
    us: int = 0
    fallback: str | None = None

    def used_tokens(self, cached_tokens: int) -> int:
        """How many of the tokens that the prefill did not compute were fetched."""
        return min(self.tokens, max(0, cached_tokens - self.own_tokens))


@dataclass(slots=True, eq=False)
class Job:
    """`accepted_ns` is monotonic. `stop` is why a prefill ends early: one that runs does so at its next step boundary.
    `remaining_us` is the work that is left and orders the queue, so it changes only while the job is not queued.
    `started` says that its first step has been announced, `fetched` that it waits for no blocks of others any more."""

    assign: Assign
    accepted_ns: int
    stage: Stage = Stage.QUEUED
    stop: AbortReason | None = None
    started: bool = False
    handed_off: bool = False
    fetched: Fetched | None = None
    key: JobKey = field(init=False)
    remaining_us: int = field(init=False)
    progress: Progress = field(default_factory=Progress)
    _chain: tuple[BlockId, ...] | None = None

    def __post_init__(self) -> None:
        self.key = JobKey(self.assign.request, self.assign.attempt)
        self.remaining_us = self.assign.service_us

    def go_on(self, left_us: int) -> None:
        """After a chunk, with so much left by the prediction. It counts as many times that as it did in the assignment: those
        who wait are ordered by what their routers think that they really take here."""
        self.remaining_us = round(self.assign.ratio * left_us)

    @property
    def begun(self) -> bool:
        """Whether the engine holds KV blocks for the whole prompt: it has had a step and needs more."""
        return self.progress.steps > 0

    @property
    def holds_prefill(self) -> bool:
        """Whether the KV of the finished prefill is still pinned, until it is handed off or its stream ends."""
        return self.stage is Stage.STREAMING and not self.handed_off

    @property
    def worker(self) -> WorkerId:
        return self.assign.worker

    @property
    def chain(self) -> tuple[BlockId, ...]:
        """The ids of the prompt's whole blocks. A bad length has been refused before there was a job. Unpacked on first use:
        a long queue asks only for its head's."""
        if self._chain is None:
            self._chain = tuple(unpack_block_ids(self.assign.block_ids))
        return self._chain
