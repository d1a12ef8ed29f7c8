"""The queue's two orders, and what is claimed ahead."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.job import Job
from services.worker.queue import CLAIMS_AHEAD_MAX, WAIT_NS_MAX, WorkerQueue
from shared.model.parameters import WorkerOrder
from tests.services.worker.scripted import World, prompt

SECOND_NS = 10**9


def jobs(*lengths: int) -> list[Job]:
    """Accepted one after the other, a nanosecond apart; a millisecond of work per token."""
    world = World()
    return [Job(world.assignment(f"r{index}", prompt(length)), index) for index, length in enumerate(lengths)]


def filled(queued: list[Job]) -> WorkerQueue:
    queue = WorkerQueue(100)
    for job in queued:
        queue.push(job)
    return queue


def test_order_of_arrival_is_order_of_service_under_fcfs() -> None:
    first, second, third = jobs(30, 20, 10)
    queue = filled([first, second, third])
    assert list(queue.in_order("fcfs", 0)) == [first, second, third]
    queue.remove(second)
    queue.remove(first)
    assert list(queue.in_order("fcfs", 0)) == [third]
    assert len(queue) == 1


def test_the_shortest_goes_first_and_of_equals_the_older() -> None:
    long, short, other, shortest = jobs(30, 20, 20, 10)
    queue = filled([other, long, shortest, short])
    assert list(queue.in_order("shortest-first", 100)) == [shortest, short, other, long]


def test_who_has_waited_thirty_seconds_goes_first_and_the_oldest_of_them_before_the_others() -> None:
    longest, long, short = jobs(40, 30, 10)
    queue = filled([longest, long, short])
    assert list(queue.in_order("shortest-first", WAIT_NS_MAX - 1)) == [short, long, longest]
    assert list(queue.in_order("shortest-first", WAIT_NS_MAX)) == [longest, short, long]
    assert list(queue.in_order("shortest-first", WAIT_NS_MAX + 1)) == [longest, long, short]
    assert list(queue.in_order("shortest-first", WAIT_NS_MAX + 2)) == [longest, long, short]


def test_what_is_left_of_a_prompt_decides_where_it_goes_between_two_chunks() -> None:
    long, short = jobs(100, 50)
    queue = filled([long, short])
    queue.remove(long)
    long.remaining_us = 40_000
    queue.put_back(long)
    assert list(queue.in_order("shortest-first", 10)) == [long, short]


def test_what_is_left_is_counted_like_the_work_of_those_who_wait() -> None:
    """A worker that takes twice what is predicted: 60 ms of the prompt are left by the prediction, and 120 by the worker, which
    the other one's 100 are by already."""
    long, short = jobs(100, 50)
    long, short = (
        Job(each.assign.model_copy(update={"ratio": 2.0, "service_us": us}), each.accepted_ns)
        for each, us in ((long, 200_000), (short, 100_000))
    )
    queue = filled([long, short])
    queue.remove(long)
    long.go_on(60_000)
    queue.put_back(long)
    assert (long.remaining_us, list(queue.in_order("shortest-first", 10))) == (120_000, [short, long])
    queue.remove(long)
    long.go_on(40_000)
    queue.put_back(long)
    assert list(queue.in_order("shortest-first", 10)) == [long, short]


def test_a_full_queue_takes_nothing_new_but_takes_back_what_it_had() -> None:
    first, second = jobs(10, 10)
    queue = WorkerQueue(1)
    assert not queue.full
    queue.push(first)
    assert queue.full
    with pytest.raises(AssertionError):
        queue.push(second)
    queue.put_back(second)
    assert len(queue) == 2


def test_the_head_is_claimed_whatever_its_size() -> None:
    queued = jobs(1_000, 2_000)
    assert filled(queued).to_claim("shortest-first", 0, bytes_max=100, begun_only=False) == queued[:1]


def test_claims_ahead_stay_within_their_bytes_and_their_number() -> None:
    queued = jobs(100, 100, 100)
    assert filled(queued).to_claim("fcfs", 0, bytes_max=800, begun_only=False) == queued[:2]
    many = jobs(*[10] * 70)
    assert filled(many).to_claim("fcfs", 0, bytes_max=1 << 20, begun_only=False) == many[:CLAIMS_AHEAD_MAX]


def test_those_that_were_begun_may_be_asked_for_alone() -> None:
    short, long = jobs(10, 100)
    long.progress.add(50, 1, 1)
    queue = filled([short, long])
    assert queue.to_claim("shortest-first", 0, bytes_max=1 << 20, begun_only=True) == [long]


def test_an_empty_queue_claims_nothing() -> None:
    queue = WorkerQueue(1)
    assert list(queue.in_order("shortest-first", 0)) == []
    assert queue.to_claim("fcfs", 0, 100, begun_only=False) == []


class Line(RuleBasedStateMachine):
    """Any order of arrivals, steps, chunks and departures against plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.queue = WorkerQueue(6)
        self.line: list[Job] = []
        self.running: list[Job] = []
        self.now_ns = 0
        self.count = 0

    @rule(length=st.integers(1, 50), after_s=st.integers(0, 12))
    def arrive(self, length: int, after_s: int) -> None:
        self.now_ns += after_s * SECOND_NS
        if self.queue.full:
            return
        self.count += 1
        job = Job(self.world.assignment(f"r{self.count:04}", prompt(length)), self.now_ns)
        self.queue.push(job)
        self.line.append(job)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.line))
        self.queue.remove(job)
        self.line.remove(job)

    @precondition(lambda self: self.line)
    @rule(data=st.data(), left=st.integers(1, 50))
    def take_a_chunk(self, data: st.DataObject, left: int) -> None:
        job = data.draw(st.sampled_from(self.line))
        self.queue.remove(job)
        job.remaining_us = left * 1_000
        self.queue.put_back(job)

    @invariant()
    def both_orders_are_right(self) -> None:
        self.queue.check()
        by_age = sorted(self.line, key=lambda job: (job.accepted_ns, job.key))
        assert list(self.queue.in_order("fcfs", self.now_ns)) == by_age
        late = [job for job in by_age if self.now_ns - job.accepted_ns >= WAIT_NS_MAX]
        others = sorted(
            (job for job in by_age if job not in late), key=lambda job: (job.remaining_us, job.accepted_ns, job.key)
        )
        assert list(self.queue.in_order("shortest-first", self.now_ns)) == late + others


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.sampled_from(["shortest-first", "fcfs"]),
    st.integers(1, 12),
)
def test_nobody_starves_however_many_shorter_ones_come(
    lengths: list[int], order: WorkerOrder, seconds_apart: int
) -> None:
    """One job is served at each tick, and before each a job shorter than all comes."""
    world = World()
    queue, waiting = WorkerQueue(1_000), jobs(*lengths)
    for job in waiting:
        queue.push(job)
    served = 0
    ticks = WAIT_NS_MAX // (seconds_apart * SECOND_NS) + len(lengths) + 2
    for tick in range(1, ticks + 1):
        now_ns = tick * seconds_apart * SECOND_NS
        queue.push(Job(world.assignment(f"new{tick}", prompt(1)), now_ns))
        head = next(queue.in_order(order, now_ns))
        queue.remove(head)
        served += head in waiting
    assert served == len(waiting)
