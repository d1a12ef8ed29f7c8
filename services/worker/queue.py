"""One worker's queue, first come first served: the order of the paper's policy, which `E_C` prices exactly.

Pure. A queued assignment is not claimed yet or is being claimed; whoever starts it takes it out.
"""

from collections.abc import Iterator

from services.worker.job import Job, JobKey
from shared.contracts.commands import TOKEN_BYTES

CLAIMS_AHEAD_MAX = 4
"""How many leading assignments are claimed. One would do if claims took no time; four cover a burst of short prompts."""


class WorkerQueue:
    """At most `jobs_max` assignments. Order of arrival is order of service."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._jobs: dict[JobKey, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    @property
    def full(self) -> bool:
        return len(self._jobs) >= self._jobs_max

    @property
    def head(self) -> Job | None:
        """Who is served next."""
        return next(iter(self._jobs.values()), None)

    def push(self, job: Job) -> None:
        """Last in line. The caller has asked `full`."""
        assert not self.full, "a full queue takes nothing"
        assert job.key not in self._jobs, f"{job.key} is queued twice"
        self._jobs[job.key] = job

    def remove(self, job: Job) -> None:
        """From anywhere in the line."""
        del self._jobs[job.key]

    def to_claim(self, bytes_max: int) -> list[Job]:
        """The leading assignments whose tokens should be here: the head always, others while all fit into `bytes_max`."""
        chosen: list[Job] = []
        size = 0
        for job in self._jobs.values():
            size += TOKEN_BYTES * job.assign.prompt_tokens
            if chosen and (size > bytes_max or len(chosen) == CLAIMS_AHEAD_MAX):
                break
            chosen.append(job)
        return chosen
