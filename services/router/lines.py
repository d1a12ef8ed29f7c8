"""The work at one worker, as its router sees it: what runs, and who waits in which order.

A newcomer's wait is what will be served before it, by the worker's own order (`services/worker/queue.py`): shortest first,
but whoever has waited `WAIT_NS_MAX` goes before all others. Between two chunks a long prompt waits like any other.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from shared.contracts.ids import RequestId, WorkerId
from shared.model.parameters import WAIT_NS_MAX

HUNG_FACTOR = 3
HUNG_US_MIN = 5_000_000
"""A worker that has given no sign for longer than both bounds is ineligible: a hung worker must not look idle."""

FOREVER = 2**62
"""Later than any time and more than any work; with a minus, before all times."""


@dataclass(slots=True)
class Assignment:
    """Where one attempt is. `started` says that its first step has begun, `left_us` what is left of `service_us` as of the
    last blocks that it stored; `prefilled` ends the prefill's reservation. `chunk_us` is the most that a step works on it."""

    worker: WorkerId
    service_us: int
    since_ns: int
    decode_worker: WorkerId | None
    output_tokens: int
    seen_seq: int
    uncached_tokens: int
    prompt_tokens: int
    left_us: int
    chunk_us: int
    fetch_from: WorkerId | None = None
    started: bool = False
    prefilled: bool = False


class Ahead(NamedTuple):
    """`queue_us` of work will be done before a newcomer, and `jobs` will be served after it."""

    queue_us: int
    jobs: int


class _Waiting(NamedTuple):
    """Sorts by work."""

    service_us: int
    since_ns: int
    request: RequestId


class Order(NamedTuple):
    """Those of a line that go by their work, the least first: `works` and the sums of the first none, one, two… of them. It
    holds from `from_ns` on until somebody more has waited too long."""

    works: list[int]
    sums: list[int]
    from_ns: int
    until_ns: int


@dataclass(slots=True)
class Line:
    """Who waits for a first step. What a question needs is summed up at the first one after a change, and kept until the
    next or until somebody more has waited too long: a decision asks every worker and changes one."""

    _by_work: list[_Waiting] = field(default_factory=list)
    _ages_ns: list[int] = field(default_factory=list)
    total_us: int = 0
    _late: int | None = field(default=None, compare=False)
    _works: list[int] = field(default_factory=list, compare=False)
    _sums: list[int] = field(default_factory=list, compare=False)

    def __len__(self) -> int:
        return len(self._by_work)

    def __iter__(self) -> Iterator[RequestId]:
        return (each.request for each in self._by_work)

    def __reversed__(self) -> Iterator[RequestId]:
        return (each.request for each in reversed(self._by_work))

    def add(self, request: RequestId, assignment: Assignment) -> None:
        """One more."""
        insort(self._by_work, _Waiting(assignment.service_us, assignment.since_ns, request))
        insort(self._ages_ns, assignment.since_ns)
        self.total_us += assignment.service_us
        self._late = None

    def remove(self, request: RequestId, assignment: Assignment) -> None:
        """It was added with these."""
        waiting = _Waiting(assignment.service_us, assignment.since_ns, request)
        del self._by_work[bisect_left(self._by_work, waiting)]
        del self._ages_ns[bisect_left(self._ages_ns, assignment.since_ns)]
        self.total_us -= assignment.service_us
        self._late = None

    def ahead(self, service_us: int, now_ns: int) -> Ahead:
        """Of equal work the older goes first, and a newcomer is the youngest."""
        self._sum_up(now_ns)
        before = bisect_right(self._works, service_us)
        return Ahead(self.total_us - self._sums[-1] + self._sums[before], len(self._works) - before)

    def as_of(self, now_ns: int) -> Order:
        """All that `ahead` reads. The lists are the line's own."""
        late = self._sum_up(now_ns)
        ages_ns = self._ages_ns
        from_ns = ages_ns[late - 1] + WAIT_NS_MAX if late else -FOREVER
        until_ns = ages_ns[late] + WAIT_NS_MAX if late < len(ages_ns) else FOREVER
        return Order(self._works, self._sums, from_ns, until_ns)

    def _sum_up(self, now_ns: int) -> int:
        """Returns how many have waited too long."""
        late = bisect_right(self._ages_ns, now_ns - WAIT_NS_MAX)
        if late == self._late:
            return late
        waiting = self._by_work if not late else [e for e in self._by_work if e.since_ns > now_ns - WAIT_NS_MAX]
        self._works = [each.service_us for each in waiting]
        self._sums = list(accumulate(self._works, initial=0))
        self._late = late
        return late


@dataclass(slots=True)
class Load:
    """One worker: who waits there, those whose first step has begun, and the wall clock of the worker's last sign."""

    line: Line = field(default_factory=Line)
    running: dict[RequestId, Assignment] = field(default_factory=dict)
    sign_ns: int | None = None

    def __bool__(self) -> bool:
        return bool(self.line or self.running)

    def at(self, now_ns: int) -> tuple[int, bool]:
        """q, and whether what runs is past every bound. It needs the rest of its prediction, or a quarter of the time since
        the last sign if that is more. How much of it the current step holds is not known here, so the bound is for all."""
        if self.sign_ns is None:
            return self.line.total_us, False
        elapsed_us = max(0, now_ns - self.sign_ns) // 1_000
        left_us = sum(each.left_us for each in self.running.values())
        hung = elapsed_us > max(HUNG_FACTOR * left_us, HUNG_US_MIN)
        return self.line.total_us + max(left_us - elapsed_us, elapsed_us // 4), hung

    def ahead(self, service_us: int, now_ns: int) -> Ahead:
        """What a request of this much work would wait for under shortest-first. Of what runs and has more left, the worker
        does one chunk at a time: at most the longest of them is in the current step, and all wait for the newcomer then."""
        queue_us, jobs = self.line.ahead(service_us, now_ns)
        if self.sign_ns is None:
            return Ahead(queue_us, jobs)
        elapsed_us = max(0, now_ns - self.sign_ns) // 1_000
        left_us = chunk_us = 0
        for each in self.running.values():
            if each.left_us > service_us and each.chunk_us < each.left_us:
                chunk_us = max(chunk_us, each.chunk_us)
                jobs += 1
            else:
                left_us += each.left_us
        left_us += chunk_us
        return Ahead(queue_us + max(left_us - elapsed_us, elapsed_us // 4), jobs)
