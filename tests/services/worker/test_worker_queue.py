"""The queue is first come first served, and bounds what is claimed ahead."""

import pytest

from services.worker.job import Job
from services.worker.queue import CLAIMS_AHEAD_MAX, WorkerQueue
from tests.services.worker.scripted import World, prompt


def jobs(*lengths: int) -> list[Job]:
    world = World()
    return [Job(world.assignment(f"r{index}", prompt(length)), index) for index, length in enumerate(lengths)]


def filled(queued: list[Job]) -> WorkerQueue:
    queue = WorkerQueue(100)
    for job in queued:
        queue.push(job)
    return queue


def test_order_of_arrival_is_order_of_service() -> None:
    first, second, third = jobs(10, 20, 30)
    queue = filled([first, second, third])
    assert queue.head is first
    queue.remove(second)
    queue.remove(first)
    assert queue.head is third
    assert len(queue) == 1


def test_a_full_queue_says_so_and_takes_nothing() -> None:
    first, second = jobs(10, 10)
    queue = WorkerQueue(1)
    assert not queue.full
    queue.push(first)
    assert queue.full
    with pytest.raises(AssertionError):
        queue.push(second)


def test_the_head_is_claimed_whatever_its_size() -> None:
    queued = jobs(1_000, 10)
    assert filled(queued).to_claim(bytes_max=100) == queued[:1]


def test_claims_ahead_stay_within_their_bytes_and_their_number() -> None:
    queued = jobs(100, 100, 100)
    assert filled(queued).to_claim(bytes_max=800) == queued[:2]
    many = jobs(*[10] * 20)
    assert filled(many).to_claim(bytes_max=1 << 20) == many[:CLAIMS_AHEAD_MAX]


def test_an_empty_queue_has_no_head_and_claims_nothing() -> None:
    queue = WorkerQueue(1)
    assert queue.head is None
    assert queue.to_claim(100) == []
