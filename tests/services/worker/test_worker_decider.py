"""The agent's rules without an agent: any order of commands and engine results keeps what the decider promises."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.admission import refuse_assign
from services.worker.decider import (
    Geometry,
    Prefilled,
    State,
    abort_job,
    chunk_done,
    complete,
    cut_short,
    evolve,
    initial,
    lose,
    register,
    serve,
    start,
)
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import ItemResult, Stored, Token
from services.worker.geometry import drained, refuse_adopt
from services.worker.job import Job, JobKey, Stage
from shared.contracts import envelope
from shared.contracts.commands import Adopt
from shared.contracts.envelope import Envelope, EventData
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    PrefillAborted,
    PrefillCompleted,
    RouterLost,
)
from shared.contracts.ids import BLOCK_ID_BYTES, BlockId, RequestId, Source
from shared.runtime.clock import Ids
from shared.runtime.memory import ManualClock
from tests.services.worker.scripted import NODE, SMALL, World, committed, prompt, worker

DESCRIPTION = ModelledEngine(SMALL, ManualClock(), random.Random(1)).describe()
IDS = Ids(ManualClock(), random.Random(1))


def stored(data: EventData, seq: int = 0) -> envelope.Stored:
    event = Envelope(
        id=IDS.next(),
        type=data.TYPE,
        version=data.VERSION,
        pool="test",
        source=Source("s"),
        source_seq=1,
        time_ns=0,
        data=data,
    )
    return envelope.Stored("log", seq, event)


class Node(RuleBasedStateMachine):
    """One incarnation under arbitrary commands. What the shell would do is done here in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.state = initial(NODE, queue_max=3)
        self.facts: list[EventData] = []
        self.accepted: list[JobKey] = []
        self.depth = 0
        serve(self.state, Geometry(1, (1, 1, 2)), {})
        self.record(register(self.state, DESCRIPTION, "c"))

    def record(self, facts: list[EventData]) -> None:
        self.facts += facts
        for fact in facts:
            evolve(self.state, stored(fact))

    @rule(request=st.integers(0, 5), attempt=st.integers(1, 3), rank=st.sampled_from([0, 1, 2]))
    def assign(self, request: int, attempt: int, rank: int) -> None:
        assign = self.world.assignment(f"r{request}", prompt(64), at=worker(rank), attempt=attempt)
        key = JobKey(assign.request, attempt)
        desk = self.state.desk
        if desk.answer_to(key) is not None:
            assert key in self.accepted or desk.find(*key) is None
            return
        if refuse_assign(self.state, DESCRIPTION, assign) is not None:
            return
        for older in desk.of_request(assign.request):
            if older.stage is Stage.QUEUED:
                self.record(abort_job(older, "released"))
        desk.accept(assign, 0)
        self.accepted.append(key)

    @rule(request=st.integers(0, 5), attempt=st.integers(1, 3))
    def release(self, request: int, attempt: int) -> None:
        job = self.state.desk.find(RequestId(f"r{request}"), attempt)
        key = JobKey(RequestId(f"r{request}"), attempt)
        if job is None and self.state.desk.answer_to(key) is None:
            self.state.desk.refuse_later(key)
        elif job is not None and job.stage is Stage.QUEUED:
            self.record(abort_job(job, "released"))

    @rule(rank=st.sampled_from([0, 1, 2]))
    def begin(self, rank: int) -> None:
        for job in list(self.state.desk.queue(worker(rank)).in_order("shortest-first", 0))[:2]:
            if job.started:
                assert start(job, 0) == [], "a prefill is announced once"
                self.state.desk.start(job)
            else:
                self.record(start(job, 0))
                assert start(job, 0) == [], "a decision may be repeated"

    @rule(rank=st.sampled_from([0, 1, 2]), blocks=st.integers(0, 4), evicted=st.integers(0, 3))
    def finish(self, rank: int, blocks: int, evicted: int) -> None:
        job = self.in_step(rank)
        if job is None:
            return
        gone = min(evicted, self.state.held_blocks.get(worker(rank), 0))
        result = ItemResult(job.key.engine_id, 0, 64, Token(1), Stored(0, blocks))
        ids = tuple(BlockId(bytes([index]) * BLOCK_ID_BYTES) for index in range(gone))
        prefilled = Prefilled(
            result, ids, queue_us=0, prefill_us=1, predicted_us=1, computed_tokens=64, cached_tokens=0, steps=1
        )
        self.record(complete(self.state, job, prefilled))
        assert complete(self.state, job, prefilled) == []

    @rule(rank=st.sampled_from([0, 1, 2]), blocks=st.integers(0, 3), evicted=st.integers(0, 3))
    def end_a_chunk(self, rank: int, blocks: int, evicted: int) -> None:
        if (job := self.in_step(rank)) is not None:
            gone = min(evicted, self.state.held_blocks.get(worker(rank), 0))
            result = ItemResult(job.key.engine_id, 0, 48, None, Stored(0, blocks), "unfinished")
            ids = tuple(BlockId(bytes([index]) * BLOCK_ID_BYTES) for index in range(gone))
            self.record(chunk_done(self.state, job, result, ids))
            self.state.desk.put_back(job)
            assert chunk_done(self.state, job, result, ids) == []
            assert job.stage is Stage.QUEUED, "between two chunks it counts as queued"

    def in_step(self, rank: int) -> Job | None:
        return next(iter(self.state.desk.running().get(worker(rank), ())), None)

    @rule(rank=st.sampled_from([0, 1, 2]), blocks=st.integers(0, 4))
    def cancel_in_its_step(self, rank: int, blocks: int) -> None:
        if (job := self.in_step(rank)) is not None:
            held = self.state.held_blocks.get(job.worker, 0)
            result = ItemResult(job.key.engine_id, 0, 64, None, Stored(0, blocks), "cancelled")
            self.record(cut_short(self.state, job, "cancelled", result, ()))
            assert cut_short(self.state, job, "cancelled", result, ()) == []
            assert self.state.held_blocks.get(job.worker, 0) == held + blocks, "what was finished stays cached"

    @rule(rank=st.sampled_from([0, 1, 2]))
    def break_off(self, rank: int) -> None:
        if (job := self.in_step(rank)) is not None:
            self.record(abort_job(job, "cancelled"))
            assert abort_job(job, "cancelled") == []

    @precondition(lambda self: any(job.stage is Stage.STREAMING for job in self.state.desk))
    @rule()
    def end_a_stream(self) -> None:
        job = next(job for job in self.state.desk if job.stage is Stage.STREAMING)
        self.state.desk.end(job)
        self.state.desk.end(job)

    @rule(rank=st.sampled_from([0, 1, 2]))
    def drain(self, rank: int) -> None:
        self.state.desk.drain([worker(rank)])
        for job in list(self.state.desk.queue(worker(rank))):
            self.record(abort_job(job, "draining"))

    @rule()
    def call_off(self) -> None:
        self.state.desk.reopen()

    @invariant()
    def the_desk_is_consistent(self) -> None:
        self.state.desk.check()

    @invariant()
    def cache_events_have_no_gap(self) -> None:
        of_worker: dict[str, list[int]] = {}
        for fact in self.facts:
            if isinstance(fact, BlocksStored | BlocksEvicted):
                of_worker.setdefault(fact.worker, []).append(fact.number)
        for numbers in of_worker.values():
            assert numbers == list(range(1, len(numbers) + 1))

    @invariant()
    def nothing_ends_twice(self) -> None:
        assert all(count == 1 for count in self.ends().values())
        assert self.ends().keys() <= set(self.accepted)

    def ends(self) -> Counter[JobKey]:
        ended = [fact for fact in self.facts if isinstance(fact, PrefillCompleted | PrefillAborted)]
        return Counter(JobKey(fact.request, fact.attempt) for fact in ended)

    def teardown(self) -> None:
        """When the node is lost, whatever was accepted has its end."""
        self.record(lose(self.state, "test"))
        for job in self.state.desk:
            self.record(abort_job(job, "engine-died"))
        assert self.ends().keys() == set(self.accepted)
        assert len(set(self.accepted)) == len(self.accepted), "an assignment was accepted twice"
        assert [fact for fact in self.facts if isinstance(fact, NodeLost)] == [
            NodeLost(node=NODE, incarnation=1, reason="test")
        ]
        assert lose(self.state, "test") == []
        for job in self.state.desk:
            assert job.stage is Stage.STREAMING
            self.state.desk.end(job)
        self.state.desk.check()


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- incarnations


def test_an_incarnation_follows_the_highest_the_log_knows() -> None:
    state = initial(NODE, 1)
    registered = register(state, DESCRIPTION, "c")[-1]
    assert isinstance(registered, NodeRegistered)
    assert registered.incarnation == 1
    evolve(state, stored(registered.model_copy(update={"incarnation": 7})))
    evolve(state, stored(registered))
    lost, again = register(state, DESCRIPTION, "c")
    assert lost == NodeLost(node=NODE, incarnation=7, reason="the agent was restarted")
    assert again.incarnation == 8


@pytest.mark.parametrize(("chunk_tokens", "degree"), [(None, 1), (1_024, 1), (1_025, 2), (4_096, 4), (1 << 20, 4)])
def test_a_node_says_which_workers_hold_less_than_a_step_computes(chunk_tokens: int | None, degree: int) -> None:
    """1,024 tokens of each rank, and no prompt has more than 4,000."""
    engine = replace(DESCRIPTION, degrees=(1, 2, 4), block_tokens=64, blocks_per_rank=16, prompt_tokens_max=4_000)
    registered = register(initial(NODE, 1), engine, "c", chunk_tokens)[-1]
    assert isinstance(registered, NodeRegistered)
    assert registered.degree_min == degree


def test_a_node_that_was_declared_lost_is_not_said_to_be_lost_again() -> None:
    state = initial(NODE, 1)
    evolve(state, stored(register(state, DESCRIPTION, "c")[-1]))
    evolve(state, stored(NodeDeclaredLost(node=NODE, incarnation=1, silent_us=1)))
    assert [fact.TYPE for fact in register(state, DESCRIPTION, "c")] == ["node-registered"]


def test_a_late_loss_of_an_older_incarnation_does_not_end_this_one() -> None:
    state = initial(NODE, 1)
    for incarnation in (1, 2):
        data = register(state, DESCRIPTION, "c")[-1]
        evolve(state, stored(data.model_copy(update={"incarnation": incarnation})))
    evolve(state, stored(NodeLost(node=NODE, incarnation=1, reason="late")))
    assert state.alive


def test_other_nodes_events_change_nothing() -> None:
    state = initial(NODE, 1)
    foreign = committed(3, (4,)).model_copy(update={"node": "n9"})
    evolve(state, stored(foreign))
    evolve(state, stored(NodeLost(node="n9", incarnation=5, reason="x")))
    assert (state.incarnation, state.committed.epoch) == (0, 0)


# --- geometry


def adopt_order(**changes: object) -> Adopt:
    order = Adopt(term=1, node=NODE, incarnation=1, epoch=2, composition=(2, 2))
    return order.model_copy(update=changes)


def registered_node() -> State:
    state = initial(NODE, 1)
    serve(state, Geometry(1, (1, 1, 2)), {})
    evolve(state, stored(register(state, DESCRIPTION, "c")[-1]))
    evolve(state, stored(committed(1, (1, 1, 2))))
    return state


def refusal_of(**changes: object) -> str | None:
    state = registered_node()
    evolve(state, stored(LeadershipTaken(leader="c", term=1)))
    refusal = refuse_adopt(state, adopt_order(**changes), prefill_ranks=4)
    return refusal.reason if refusal else None


def test_a_newer_epoch_is_adopted_and_the_served_one_may_be_asked_for_again() -> None:
    assert refusal_of() is None
    assert refusal_of(epoch=1, composition=(1, 1, 2)) is None


def test_orders_of_another_time_or_place_are_refused() -> None:
    assert refusal_of(term=0) == "stale-term"
    assert refusal_of(node="n9") == "bad-command"
    assert refusal_of(incarnation=2) == "stale-epoch"
    assert refusal_of(epoch=1, composition=(4,)) == "stale-epoch"


def test_compositions_these_ranks_cannot_serve_are_refused() -> None:
    assert refusal_of(composition=(2, 2, 2)) == "bad-command"
    assert refusal_of(composition=(1, 2, 1)) == "bad-command"
    assert refusal_of(composition=()) == "bad-command"


def test_a_committed_epoch_is_adopted_as_it_was_committed() -> None:
    state = registered_node()
    evolve(state, stored(committed(3, (4,))))
    assert refuse_adopt(state, adopt_order(epoch=3, composition=(4,)), 4) is None
    assert refuse_adopt(state, adopt_order(epoch=2), 4).reason == "stale-epoch"
    wrong = refuse_adopt(state, adopt_order(epoch=3), 4)
    assert wrong is not None
    assert "was committed as (4,)" in wrong.detail


def test_a_drain_that_was_called_off_is_not_completed() -> None:
    state = registered_node()
    state.desk.drain([worker(0)])
    assert drained(state, (worker(0),), 0, 1)
    state.desk.reopen()
    assert drained(state, (worker(0),), 0, 1) == []


# --- what is refused


def refused(**changes: object) -> tuple[str, str] | None:
    state = registered_node()
    evolve(state, stored(RouterLost(router="r0", source="gone")))
    assign = World().assignment("a", prompt(64)).model_copy(update=changes)
    refusal = refuse_assign(state, DESCRIPTION, assign)
    return (refusal.reason, refusal.detail.split(":")[0]) if refusal else None


def test_a_good_assignment_is_not_refused() -> None:
    assert refused() is None
    assert refused(decode_worker="n0/decode/0", max_new_tokens=5) is None


def test_a_continued_request_may_name_fewer_blocks_than_its_prompt_has() -> None:
    assert refused(block_ids=b"") is None


def test_a_bad_field_is_named() -> None:
    assert refused(prompt_tokens=0) == ("bad-command", "prompt_tokens")
    assert refused(prompt_tokens=10**6) == ("bad-command", "prompt_tokens")
    assert refused(block_ids=b"x" * 15) == ("bad-command", "block_ids")
    assert refused(block_ids=b"x" * 16 * 5) == ("bad-command", "block_ids")
    assert refused(block_ids=b"x" * 16 * 2) == ("bad-command", "block_ids"), "each block comes once"
    assert refused(max_new_tokens=0) == ("bad-command", "max_new_tokens")
    assert refused(decode_worker="n0/decode/7") == ("bad-command", "decode_worker")
    assert refused(decode_worker="n1/decode/0") is None, "which ranks another node has is its own affair"
    assert refused(router_source="gone") == ("bad-command", "router_source")


def test_a_worker_of_another_epoch_is_stale_and_of_another_node_unknown() -> None:
    assert refused(worker=worker(0, epoch=2)) == ("stale-epoch", "worker")
    assert refused(worker="n0/junk") == ("stale-epoch", "worker")
    assert refused(worker="n9/1/0") == ("unknown-worker", "worker")


def test_the_committed_geometry_is_the_last_one() -> None:
    state = initial(NODE, 1)
    for epoch, composition in ((1, (4,)), (2, (2, 2))):
        evolve(state, stored(committed(epoch, composition)))
    assert state.committed == Geometry(2, (2, 2))
