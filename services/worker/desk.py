"""The assignments of one node: what was accepted, where it stands, and what a repeated or late command is answered.

Pure, and in memory only: an acceptance is the agent's promise to a router, not a fact of the log, and it ends with the
agent's life. Rules:

1.  A repeated `assign` gets the answer of the first and does nothing, while its job is open and for `ANSWERS_MAX` ends after.
2.  An attempt that was given up before it came is refused when it comes; so is one that is older than what is here.
3.  A drained worker accepts nothing until it is opened again or its node takes another geometry.
4.  Every accepted job leaves exactly once: `end`.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from services.worker.job import Job, JobKey, Stage
from services.worker.queue import WorkerQueue
from shared.contracts.commands import Accepted, Assign, Refused
from shared.contracts.ids import RequestId, WorkerId

ANSWERS_MAX = 10_000
"""Answers that outlive their job: a router repeats a command within seconds, and 10,000 jobs take longer on any node."""

_ACCEPTED = Accepted()
"""One for all: ten thousand of its like are kept."""

STREAMS_MAX = 1_024
"""Jobs of a node that may hold KV after their prefill; beyond it nothing new is accepted."""


class Desk:
    """`queue_max` bounds each worker's queue."""

    def __init__(self, queue_max: int) -> None:
        self._queue_max = queue_max
        self._queues: dict[WorkerId, WorkerQueue] = {}
        self._draining: set[WorkerId] = set()
        self._open: dict[JobKey, Job] = {}
        self._running: dict[WorkerId, dict[JobKey, Job]] = {}
        self._streams = 0
        self._answers: OrderedDict[JobKey, Accepted | Refused] = OrderedDict()

    # --- questions

    def __iter__(self) -> Iterator[Job]:
        """Every open job, oldest first."""
        return iter(tuple(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def workers(self) -> Collection[WorkerId]:
        return self._queues.keys()

    def queue(self, worker: WorkerId) -> WorkerQueue:
        return self._queues[worker]

    def running(self) -> dict[WorkerId, tuple[Job, ...]]:
        """The jobs of the step that each worker runs; an idle worker has no entry."""
        return {worker: tuple(jobs.values()) for worker, jobs in self._running.items()}

    def find(self, request: RequestId, attempt: int) -> Job | None:
        """The job while it is open."""
        return self._open.get(JobKey(request, attempt))

    def of_request(self, request: RequestId) -> list[Job]:
        """Its open attempts: one, unless a router has just given up on another."""
        return [job for key, job in self._open.items() if key.request == request]

    def answer_to(self, key: JobKey) -> Accepted | Refused | None:
        """What a repeated `assign` is answered; None if this is the first."""
        return _ACCEPTED if key in self._open else self._answers.get(key)

    def refusal(self, assign: Assign) -> Refused | None:
        """Why a new assignment to one of these workers cannot be queued now."""
        queue = self._queues[assign.worker]
        if assign.worker in self._draining:
            return Refused(reason="draining", detail=assign.worker)
        if any(job.key.attempt > assign.attempt for job in self.of_request(assign.request)):
            return Refused(reason="bad-command", detail=f"attempt {assign.attempt}: a later one is here")
        if assign.rebalanced and (len(queue) or assign.worker in self._running):
            return Refused(reason="not-idle", detail=f"{assign.worker} has work")
        if queue.full:
            return Refused(reason="full", detail=f"{assign.worker}: {len(queue)} are queued")
        if self._streams >= STREAMS_MAX:
            return Refused(reason="full", detail=f"{STREAMS_MAX} requests are streaming from this node")
        return None

    def is_draining(self, worker: WorkerId) -> bool:
        return worker in self._draining

    # --- transitions

    def open_workers(self, workers: Sequence[WorkerId]) -> None:
        """The node's workers are these from now on. Nobody is queued or runs at the old ones."""
        assert not self._running, f"the geometry changes at a step boundary, but {list(self._running)} run"
        assert not any(map(len, self._queues.values())), "queued jobs are given back before the geometry changes"
        self._queues = {worker: WorkerQueue(self._queue_max) for worker in workers}
        self._draining = set()

    def drain(self, workers: Iterable[WorkerId]) -> None:
        """Accept nothing more at these."""
        self._draining.update(workers)

    def reopen(self) -> None:
        """Every worker accepts again."""
        self._draining.clear()

    def accept(self, assign: Assign, now_ns: int) -> Job:
        """Queue it. The caller has asked `answer_to` and `refusal`."""
        job = Job(assign, now_ns)
        self._queues[job.worker].push(job)
        self._open[job.key] = job
        return job

    def start(self, job: Job) -> None:
        """A step takes it. Its first one has been announced."""
        self._queues[job.worker].remove(job)
        self._running.setdefault(job.worker, {})[job.key] = job
        job.stage, job.started = Stage.RUNNING, True

    def put_back(self, job: Job) -> None:
        """Its step is over and its prompt is not: it is queued again."""
        self._stop_running(job)
        self._queues[job.worker].put_back(job)
        job.stage = Stage.QUEUED

    def _stop_running(self, job: Job) -> None:
        jobs = self._running[job.worker]
        del jobs[job.key]
        if not jobs:
            del self._running[job.worker]

    def stream(self, job: Job) -> None:
        """Its prefill is done."""
        self._stop_running(job)
        job.stage = Stage.STREAMING
        self._streams += 1

    def end(self, job: Job) -> None:
        """It leaves, from whatever stage. Ending twice is harmless."""
        if job.stage is Stage.QUEUED:
            self._queues[job.worker].remove(job)
        elif job.stage is Stage.RUNNING:
            self._stop_running(job)
        elif job.stage is Stage.STREAMING:
            self._streams -= 1
        if self._open.pop(job.key, None) is not None:
            job.stage = Stage.ENDED
            self._remember(job.key, _ACCEPTED)

    def refuse_later(self, key: JobKey) -> None:
        """It was given up before it came. What is known keeps its answer."""
        if self.answer_to(key) is None:
            detail = f"attempt {key.attempt} was given up before it came"
            self._remember(key, Refused(reason="bad-command", detail=detail))

    def _remember(self, key: JobKey, answer: Accepted | Refused) -> None:
        self._answers[key] = answer
        if len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)

    # --- self-check

    def check(self) -> None:
        """Every open job is in exactly the place its stage names."""
        queued = {job.key for queue in self._queues.values() for job in queue}
        running = {key for jobs in self._running.values() for key in jobs}
        assert all(self._running.values()), "an idle worker has an entry"
        for queue in self._queues.values():
            queue.check()
        assert self._streams == sum(job.stage is Stage.STREAMING for job in self._open.values()), (
            "streams are miscounted"
        )
        for key, job in self._open.items():
            assert (key in queued) == (job.stage is Stage.QUEUED), f"{key}: {job.stage} and its queue disagree"
            assert (key in running) == (job.stage is Stage.RUNNING), f"{key}: {job.stage} and its worker disagree"
            assert job.stage is not Stage.ENDED, f"{key}: ended and open"
        assert queued | running <= self._open.keys(), "a job that is not open holds a place"
