"""Who is served before a newcomer: the line at a worker against the queue of the worker itself, and against sums by hand."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from services.router.lines import Ahead, Assignment, Line, Load
from services.worker.job import Job
from services.worker.queue import WorkerQueue
from shared.contracts.commands import Assign, SamplingSpec
from shared.contracts.ids import RequestId, RouterId, Source, WorkerId
from shared.model.parameters import WAIT_NS_MAX

WORKER = WorkerId("n0/1/0")
SECOND_NS = 10**9


def waiting(service_us: int, since_ns: int = 0, chunk_us: int | None = None) -> Assignment:
    return Assignment(WORKER, service_us, since_ns, None, 1, 0, 100, 100, service_us, chunk_us or service_us)


def job(number: int, service_us: int, accepted_ns: int) -> Job:
    assign = Assign(
        request=RequestId(f"r{number}"), attempt=1, router=RouterId("r"), router_source=Source("r"), worker=WORKER,
        prompt_tokens=1, block_ids=b"", max_new_tokens=1, sampling=SamplingSpec(), service_us=service_us, decision=UUID(int=1),
    )  # fmt: skip
    return Job(assign, accepted_ns)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), max_size=12),
    st.integers(1, 9),
    st.lists(st.integers(30, 90), min_size=1, max_size=4),
    st.data(),
)
def test_the_worker_serves_first_what_its_router_said_was_ahead(
    queued: list[tuple[int, int]], service_us: int, asked_at_s: list[int], data: st.DataObject
) -> None:
    """Jobs of 1 to 9 us that came in the first minute; some leave. The newcomer is asked for at any time, also backwards."""
    line, queue = Line(), WorkerQueue(100)
    jobs = [job(number, work, second * SECOND_NS) for number, (work, second) in enumerate(queued)]
    for each in jobs:
        line.add(each.assign.request, waiting(each.assign.service_us, each.accepted_ns))
        queue.push(each)
    gone = data.draw(st.sets(st.sampled_from(range(len(jobs))))) if jobs else set()
    for number in gone:
        line.ahead(service_us, asked_at_s[0] * SECOND_NS)
        line.remove(jobs[number].assign.request, waiting(jobs[number].assign.service_us, jobs[number].accepted_ns))
        queue.remove(jobs[number])
    newcomer = job(99, service_us, 10**12)
    queue.push(newcomer)
    for second in asked_at_s:
        order = list(queue.in_order("shortest-first", second * SECOND_NS))
        before, after = order[: order.index(newcomer)], order[order.index(newcomer) + 1 :]
        expected = Ahead(sum(each.assign.service_us for each in before), len(after))
        assert line.ahead(service_us, second * SECOND_NS) == expected
    assert line.total_us == sum(each.assign.service_us for each in queue) - service_us


class TestRunning:
    def test_a_whole_prompt_is_waited_for_however_long(self) -> None:
        load = Load(running={RequestId("r1"): waiting(8_000_000)}, sign_ns=0)
        assert load.ahead(1_000_000, 3 * SECOND_NS) == Ahead(5_000_000, 0)

    def test_of_a_long_one_in_chunks_a_shorter_one_waits_for_one_chunk_and_delays_it(self) -> None:
        load = Load(running={RequestId("r1"): waiting(8_000_000, chunk_us=2_000_000)}, sign_ns=0)
        assert load.ahead(1_000_000, SECOND_NS // 2) == Ahead(1_500_000, 1)
        assert load.ahead(8_000_000, SECOND_NS // 2) == Ahead(7_500_000, 0)

    def test_only_the_longest_chunk_can_be_in_the_step_that_runs(self) -> None:
        running = {
            RequestId("r1"): waiting(8_000_000, chunk_us=2_000_000),
            RequestId("r2"): waiting(9_000_000, chunk_us=3_000_000),
            RequestId("r3"): waiting(500_000),
        }
        assert Load(running=running, sign_ns=0).ahead(1_000_000, 0) == Ahead(3_500_000, 2)

    def test_one_that_takes_longer_than_predicted_needs_a_quarter_of_the_time_that_it_has_had(self) -> None:
        load = Load(running={RequestId("r1"): waiting(1_000_000)}, sign_ns=0)
        assert load.ahead(1, 4 * SECOND_NS) == Ahead(1_000_000, 0)


def test_who_has_waited_too_long_goes_first_whatever_its_work() -> None:
    line = Line()
    line.add(RequestId("long"), waiting(9_000_000, 0))
    line.add(RequestId("young"), waiting(9_000_000, 1))
    assert line.ahead(1_000_000, WAIT_NS_MAX - 1) == Ahead(0, 2)
    assert line.ahead(1_000_000, WAIT_NS_MAX) == Ahead(9_000_000, 1)
