"""One worker's queue: who is served next, and whose prompt is fetched before its turn. Pure.

`shortest-first` serves the least predicted remaining work; whoever has waited `WAIT_NS_MAX` goes before all others, oldest
first, so nobody starves. There is no other ageing. `fcfs` serves by arrival. A prompt between two of its chunks is queued
like any other, with what is left of it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from services.worker.engine.protocol import STEP_ITEMS_MAX
from services.worker.job import Job, JobKey
from shared.contracts.commands import TOKEN_BYTES
from shared.model.parameters import WAIT_NS_MAX, WorkerOrder

CLAIMS_AHEAD_MAX = STEP_ITEMS_MAX
"""How many leading assignments are claimed: a step may take as many."""


class _Arrival(NamedTuple):
    """Sorts by age."""

    accepted_ns: int
    job: JobKey


class _Work(NamedTuple):
    """Sorts by what is left; of equals the older goes first."""

    remaining_us: int
    accepted_ns: int
    job: JobKey


class WorkerQueue:
    """At most `jobs_max` assignments that wait for their first step, and those between two steps besides."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._jobs: dict[JobKey, tuple[Job, _Work]] = {}
        self._by_arrival: list[_Arrival] = []
        self._by_work: list[_Work] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """In no order that means anything."""
        return iter([job for job, _ in self._jobs.values()])

    @property
    def full(self) -> bool:
        return len(self._jobs) >= self._jobs_max

    def push(self, job: Job) -> None:
        """A new assignment. The caller has asked `full`."""
        assert not self.full, "a full queue takes nothing"
        self.put_back(job)

    def put_back(self, job: Job) -> None:
        """It was here before, so there is room: its place follows from its age and from what is left of it now."""
        assert job.key not in self._jobs, f"{job.key} is queued twice"
        work = _Work(job.remaining_us, job.accepted_ns, job.key)
        self._jobs[job.key] = job, work
        insort(self._by_work, work)
        insort(self._by_arrival, _Arrival(job.accepted_ns, job.key))

    def remove(self, job: Job) -> None:
        """From anywhere in the line."""
        _, work = self._jobs.pop(job.key)
        del self._by_work[bisect_left(self._by_work, work)]
        del self._by_arrival[bisect_left(self._by_arrival, _Arrival(job.accepted_ns, job.key))]

    def in_order(self, order: WorkerOrder, now_ns: int) -> Iterator[Job]:
        """Who is served first, second, …; `now_ns` is monotonic. Not to be changed meanwhile."""
        late_ns = now_ns - WAIT_NS_MAX
        for arrival in self._by_arrival:
            if order == "shortest-first" and arrival.accepted_ns > late_ns:
                break
            yield self._jobs[arrival.job][0]
        if order == "shortest-first":
            for work in self._by_work:
                if work.accepted_ns > late_ns:
                    yield self._jobs[work.job][0]

    def to_claim(self, order: WorkerOrder, now_ns: int, bytes_max: int, begun_only: bool) -> list[Job]:
        """The leading assignments, or those of them that were begun, whose tokens should be here: the first always, others
        while all fit into `bytes_max`."""
        chosen: list[Job] = []
        size = 0
        for job in self.in_order(order, now_ns):
            if begun_only and not job.begun:
                continue
            size += TOKEN_BYTES * job.assign.prompt_tokens
            if chosen and (size > bytes_max or len(chosen) == CLAIMS_AHEAD_MAX):
                break
            chosen.append(job)
        return chosen

    def check(self) -> None:
        """Both orders hold exactly the queued jobs, each at the place its fields name."""
        assert self._by_work == sorted(work for _, work in self._jobs.values()), "the order by work is not the queue's"
        assert self._by_arrival == sorted(_Arrival(job.accepted_ns, job.key) for job, _ in self._jobs.values()), (
            "the order by age is not the queue's"
        )
        for key, (job, work) in self._jobs.items():
            assert work == (job.remaining_us, job.accepted_ns, job.key), f"{key} has changed while it was queued"
