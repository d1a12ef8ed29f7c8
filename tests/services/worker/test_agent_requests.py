"""The life of a request at an agent, over the in-memory log and bus, with the modelled engine and a scripted router."""

from collections.abc import Callable
from dataclasses import asdict, replace
from uuid import UUID

import numpy as np
import pytest

from services.worker import desk, queue
from services.worker.engine.modelled import ModelledEngine
from services.worker.engine.protocol import PrefillStep, StepResult
from services.worker.job import Stage
from services.worker.speaking import sampling_of
from shared.contracts.commands import (
    Assign,
    Cancel,
    Claim,
    Release,
    Report,
    SamplingSpec,
    decode_command,
    encode_message,
)
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    KvHandedOff,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    RouterLost,
)
from shared.contracts.ids import RequestId
from shared.model import holders as holders_model
from shared.model.blocks import block_chain
from shared.model.holders import Holders
from tests.services.worker.scripted import (
    BLOCK_TOKENS,
    DECODE,
    KEY,
    ROUTER,
    ROUTER_SOURCE,
    SMALL,
    World,
    prompt,
    running,
    worker,
)


def aborts(world: World) -> list[tuple[str, int, str]]:
    return [(each.request, each.attempt, each.reason) for each in world.events(PrefillAborted)]


def tokens_of(world: World, request: str) -> list[int]:
    """In order, and only if no frame is missing or doubled."""
    tokens: list[int] = []
    for frame in world.of(request):
        assert frame.index == len(tokens)
        tokens.extend(frame.tokens)
    return tokens


async def test_a_prefill_gives_its_facts_and_its_first_token_when_it_ends() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(100)))
        await world.clock.advance(0.099)
        assert world.frames == []
        await world.clock.advance(0.002)
        (frame,) = world.of("a")
        assert (frame.index, len(frame.tokens), frame.finish, frame.prefill_us) == (0, 1, "length", 100_000)
        started, completed, stored = world.events(PrefillStarted, PrefillCompleted, BlocksStored)
        assert started == PrefillStarted(request="a", attempt=1, worker=worker(0), queue_us=0)
        assert (completed.computed_tokens, completed.cached_own_tokens, completed.node_epoch) == (100, 0, 1)
        assert (stored.number, stored.first_depth, stored.blocks) == (1, 0, 100 // BLOCK_TOKENS)
        assert all(each.correlation == "a" for each in world.envelopes() if each.type.startswith("prefill"))


async def test_what_comes_of_an_assignment_names_the_decision_behind_it() -> None:
    world = World()
    decision, trace = UUID(int=7), f"00-{'a' * 32}-{'b' * 16}-01"
    async with running(world):
        asked = world.assignment("a", prompt(100), max_new_tokens=2, decode=True, decision=decision, traceparent=trace)
        await world.ask(asked)
        await world.ask(world.assignment("b", prompt(100), decision=decision, traceparent=trace))
        await world.ask(Cancel(request=RequestId("b"), attempt=1))
        await world.clock.advance(2.0)
        mine = [each for each in world.envelopes() if each.correlation in ("a", "b")]
        assert {each.type for each in mine} == {
            "prefill-started", "prefill-completed", "prefill-aborted", "blocks-stored", "kv-handed-off"
        }  # fmt: skip
        assert {(each.causation, each.traceparent) for each in mine} == {(decision, trace)}


async def test_the_first_token_does_not_wait_for_the_log() -> None:
    world = World()
    async with running(world) as agent:
        await world.ask(world.assignment("a", prompt(10)))
        agent._ports.outbox._publisher.cancel()
        await world.clock.advance(0.1)
        assert len(world.of("a")) == 1
        assert world.events(PrefillCompleted) == []


async def test_a_second_prompt_reuses_what_the_first_left() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(100)))
        await world.clock.advance(0.2)
        await world.ask(world.assignment("b", prompt(100)))
        await world.clock.advance(0.2)
        second = world.events(PrefillCompleted)[1]
        assert (second.cached_own_tokens, second.computed_tokens) == (96, 4)
        assert world.of("b")[0].cached_tokens == 96
        assert len(world.events(BlocksStored)) == 1, "nothing new was stored"


async def test_decode_follows_the_hand_off_and_ends_by_length() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(100), max_new_tokens=8, decode=True))
        await world.clock.advance(2.0)
        assert len(tokens_of(world, "a")) == 8
        assert [frame.finish for frame in world.of("a")][-1] == "length"
        assert all(frame.finish is None for frame in world.of("a")[:-1])
        (handed_off,) = world.events(KvHandedOff)
        assert (handed_off.decode_worker, handed_off.bytes) == (DECODE, 100_000)
        assert len(world.state.desk) == 0


async def test_the_prompts_pins_end_with_its_hand_off() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(100), max_new_tokens=1_000, decode=True))
        await world.clock.advance(0.15)
        pinned = [world.engines[-1]._pool.counts(rank)[2] for rank in range(4)]
        assert (pinned, world.events(KvHandedOff)) == ([7, 0, 0, 0], [])
        await world.clock.advance(0.15)
        pinned = [world.engines[-1]._pool.counts(rank)[2] for rank in range(4)]
        assert (pinned, len(world.events(KvHandedOff))) == ([0, 0, 0, 0], 1)
        assert len(world.state.desk) == 1, "it decodes"


async def test_a_stop_token_ends_the_stream_wherever_it_comes() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(50), max_new_tokens=8, decode=True))
        await world.clock.advance(2.0)
        tokens = tokens_of(world, "a")
        for request, stop in (("first", tokens[0]), ("third", tokens[2])):
            await world.ask(world.assignment(request, prompt(50), max_new_tokens=8, decode=True, stop_tokens=(stop,)))
        await world.clock.advance(2.0)
        assert tokens_of(world, "first") == tokens[:1]
        assert tokens_of(world, "third") == tokens[:3]
        assert world.of("first")[-1].finish == world.of("third")[-1].finish == "stop"


async def test_a_request_that_continues_elsewhere_gets_the_tokens_it_would_have_had() -> None:
    """A redirect after some tokens prefills the prompt and what was generated, with the chain of the prompt alone."""
    world = World()
    sampling = SamplingSpec(temperature=0.8, seed=7)
    async with running(world):
        await world.ask(world.assignment("a", prompt(50), max_new_tokens=8, decode=True, sampling=sampling))
        await world.clock.advance(2.0)
        tokens = tokens_of(world, "a")
        so_far = np.array([*prompt(50).tolist(), *tokens[:3]], dtype=np.uint32)
        again = world.assignment("b", so_far, at=worker(2), max_new_tokens=5, decode=True, sampling=sampling)
        chain = b"".join(block_chain(prompt(50), BLOCK_TOKENS, KEY))
        await world.ask(again.model_copy(update={"block_ids": chain}))
        await world.clock.advance(2.0)
        assert tokens_of(world, "b") == tokens[3:]


def test_every_sampling_field_reaches_the_engine() -> None:
    asked = SamplingSpec(
        temperature=0.8, top_p=0.9, seed=7, logprobs=2, top_k=5, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3,
        repetition_penalty=1.1, logit_bias={5: -3.0}, min_tokens=4, json_schema="{}",
    )  # fmt: skip
    assign = decode_command(encode_message(World().assignment("a", prompt(50), sampling=asked, stop_tokens=(2, 9))))
    assert isinstance(assign, Assign)
    assert asdict(sampling_of(assign)) == {**asked.model_dump(), "logit_bias": ((5, -3.0),), "stops": (2, 9)}


async def test_logprobs_come_with_every_token_when_asked_for() -> None:
    world = World()
    async with running(world):
        asked = SamplingSpec(logprobs=2)
        await world.ask(world.assignment("a", prompt(20), max_new_tokens=3, decode=True, sampling=asked))
        await world.clock.advance(1.0)
        for frame in world.of("a"):
            for token, logprobs in zip(frame.tokens, frame.logprobs, strict=True):
                assert logprobs.alternatives[0][0] == token
                assert len(logprobs.alternatives) == 3


# --- repeated, late and hostile commands


async def test_a_repeated_assignment_is_accepted_again_and_served_once() -> None:
    world = World()
    async with running(world):
        assign = world.assignment("a", prompt(100))
        for wait_s in (0.0, 0.05, 1.0):
            assert (await world.ask(assign)).kind == "accepted"
            await world.clock.advance(wait_s)
        assert len(world.events(PrefillStarted)) == 1
        assert len(world.of("a")) == 1


async def test_a_queue_that_is_full_says_so() -> None:
    world = World(queue_max=2)
    async with running(world):
        replies = [(await world.ask(world.assignment(f"r{index}", prompt(500)))).kind for index in range(4)]
        assert replies == ["accepted", "accepted", "accepted", "refused"], "one runs, two wait"


async def test_a_node_whose_events_are_not_stored_takes_nothing_new() -> None:
    world = World()
    async with running(world) as agent:
        agent._ports.outbox._publisher.cancel()
        assert (await world.ask(world.assignment("a", prompt(10)))).kind == "accepted"
        await world.clock.advance(2.5)
        assert (await world.ask(world.assignment("b", prompt(10)))).reason == "full"


async def test_streams_without_number_hold_no_memory_without_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "STREAMS_MAX", 1)
    world = World()
    async with running(world):
        await world.ask(world.assignment("streams", prompt(20), max_new_tokens=1_000, decode=True))
        await world.clock.advance(0.1)
        assert (await world.ask(world.assignment("a", prompt(10)))).reason == "full"


async def test_a_released_job_leaves_the_queue_and_a_running_one_does_not() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(500)))
        await world.ask(world.assignment("b", prompt(500)))
        outcomes = [
            (await world.ask(Release(request=RequestId(request), attempt=1))).outcome
            for request in ("a", "b", "b", "never")
        ]
        assert outcomes == ["started", "released", "unknown", "unknown"]
        await world.clock.advance(2.0)
        assert aborts(world) == [("b", 1, "released")]
        assert [each.request for each in world.events(PrefillStarted)] == ["a"]


async def test_an_assignment_that_comes_after_its_release_is_not_served() -> None:
    world = World()
    async with running(world):
        await world.ask(Release(request=RequestId("a"), attempt=1))
        assert (await world.ask(world.assignment("a", prompt(50)))).kind == "refused"
        assert (await world.ask(world.assignment("a", prompt(50), attempt=2))).kind == "accepted"


async def test_a_new_attempt_voids_the_older_one() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(500)))
        await world.clock.advance(0.1)
        await world.ask(world.assignment("a", prompt(500), attempt=2))
        await world.clock.advance(2.0)
        assert aborts(world) == [("a", 1, "released")]
        assert [frame.attempt for frame in world.of("a")] == [2]
        assert (await world.ask(world.assignment("a", prompt(500), attempt=1))).kind == "accepted", "as it was"
        assert len(world.events(PrefillStarted)) == 2


async def test_an_older_attempt_that_comes_late_is_refused() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(500), attempt=2))
        assert "a later one is here" in (await world.ask(world.assignment("a", prompt(500)))).detail


async def test_junk_gets_a_clear_refusal() -> None:
    world = World()
    async with running(world):
        raw = await world.bus.request("vertumnus.test.agent.n0", b'{"kind": "assign", "request": 5}', 1.0)
        assert b'"bad-command"' in raw
        assert b"assign.request" in raw


# --- cancellation


async def test_a_cancelled_job_leaves_from_whatever_stage() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("streams", prompt(20), max_new_tokens=1_000, decode=True))
        await world.clock.advance(0.2)
        await world.ask(world.assignment("runs", prompt(500)))
        await world.ask(world.assignment("waits", prompt(500)))
        assert [job.stage for job in world.state.desk] == [Stage.STREAMING, Stage.RUNNING, Stage.QUEUED]
        for request in ("streams", "runs", "waits", "unknown"):
            assert (await world.ask(Cancel(request=RequestId(request), attempt=1))).kind == "accepted"
        await world.clock.advance(0.01)
        assert len(world.state.desk) == 0
        assert sorted(aborts(world)) == [("runs", 1, "cancelled"), ("waits", 1, "cancelled")]
        sent = len(world.frames)
        await world.clock.advance(3.0)
        assert len(world.frames) == sent, "nothing more is generated, and nobody is told what he asked for"


class Late(ModelledEngine):
    """A cancellation finds its step on the way to the engine, which knows nothing of it yet."""

    async def prefill(self, step: PrefillStep, noted: Callable[[StepResult], None] | None = None) -> StepResult:
        await self._sleep(0.1)
        return await super().prefill(step, noted)


async def test_a_cancellation_that_finds_no_step_to_stop_leaves_its_blocks_and_tells_nobody() -> None:
    world = World(engine_class=Late)
    async with running(world):
        await world.ask(world.assignment("a", prompt(100), max_new_tokens=8, decode=True))
        await world.clock.advance(0.05)
        await world.ask(Cancel(request=RequestId("a"), attempt=1))
        await world.clock.advance(1.0)
        assert (world.frames, aborts(world), len(world.state.desk)) == ([], [], 0)
        assert [each.blocks for each in world.events(BlocksStored)] == [6]


async def test_a_cancellation_is_of_its_attempt_and_those_before_it() -> None:
    world = World()
    async with running(world):
        cancel = Cancel(request=RequestId("a"), attempt=2)
        await world.ask(world.assignment("a", prompt(500), attempt=3))
        await world.ask(cancel)
        await world.ask(cancel.model_copy(update={"request": "late"}))
        assert (await world.ask(world.assignment("late", prompt(50), attempt=2))).kind == "refused", "it came too late"
        assert (await world.ask(world.assignment("late", prompt(50), attempt=3))).kind == "accepted"
        await world.clock.advance(2.0)
        assert aborts(world) == []
        assert [frame.attempt for frame in world.frames] == [3, 3]
        await world.ask(cancel.model_copy(update={"attempt": 3}))
        again = await world.ask(world.assignment("a", prompt(500), attempt=3))
        assert again.kind == "accepted", "what was served keeps its answer"


async def test_a_lost_router_leaves_nothing_behind_but_finished_blocks() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("done", prompt(64), max_new_tokens=1_000, decode=True))
        await world.clock.advance(0.5)
        await world.ask(world.assignment("runs", prompt(500)))
        await world.ask(world.assignment("waits", prompt(500)))
        await world.ask(world.assignment("others", prompt(500), at=worker(1), router_source="router-2"))
        await world.decide(RouterLost(router=ROUTER, source=ROUTER_SOURCE))
        await world.clock.advance(1.0)
        assert sorted(aborts(world)) == [("runs", 1, "router-lost"), ("waits", 1, "router-lost")]
        assert len(world.state.desk) == 0
        assert len(world.of("others")) == 1
        reply = await world.ask(world.assignment("late", prompt(10)))
        assert "declared lost" in reply.detail
        await world.ask(world.assignment("again", prompt(64), router_source="router-2"))
        await world.clock.advance(0.1)
        assert world.of("again")[0].cached_tokens == 48


# --- claims


async def test_a_lost_claim_ends_its_job_and_not_the_queue() -> None:
    world = World()
    async with running(world):
        assign = world.assignment("lost", prompt(100))
        del world.prompts[RequestId("lost")]
        await world.ask(assign)
        await world.ask(world.assignment("next", prompt(100)))
        await world.clock.advance(0.2)
        assert aborts(world) == [("lost", 1, "claim-lost")]
        assert world.of("lost")[0].error == "claim-lost"
        assert len(world.of("next")) == 1
        assert [each.request for each in world.events(PrefillStarted)] == ["next"]


async def test_a_silent_router_is_asked_three_times() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("a", prompt(100), router="nobody"))
        await world.clock.advance(5.0)
        assert aborts(world) == [("a", 1, "claim-lost")]


async def test_tokens_are_claimed_before_the_request_reaches_the_head() -> None:
    world = World()
    async with running(world):
        for index in range(8):
            await world.ask(world.assignment(f"r{index}", prompt(200)))
        assert [claim.request for claim in world.claims] == [f"r{index}" for index in range(8)]
        await world.clock.advance(2.0)
        assert len(world.events(PrefillCompleted)) == 8


async def test_no_more_is_claimed_than_a_step_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CLAIMS_AHEAD_MAX", 2)
    world = World()
    async with running(world):
        for index, length in enumerate((200, 40, 30, 20)):
            await world.ask(world.assignment(f"r{index}", prompt(length, seed=index)))
        assert [claim.request for claim in world.claims] == ["r0", "r1", "r2", "r3"], (
            "each was near the head when it came"
        )
        await world.clock.advance(2.0)
        assert [claim.request for claim in world.claims][4:] == ["r1"], "r3 had pushed it back"
        assert [each.request for each in world.events(PrefillCompleted)] == ["r0", "r3", "r2", "r1"]


async def test_a_long_prompt_comes_in_several_frames() -> None:
    world = World(node=replace(SMALL, blocks_per_rank=8_192))
    async with running(world):
        await world.ask(world.assignment("a", prompt(70_000)))
        await world.clock.advance(80.0)
        assert [claim.offset for claim in world.claims] == [0, 65_536]
        assert len(world.of("a")) == 1


async def test_a_router_that_answers_nonsense_loses_the_claim() -> None:
    world = World()
    async with running(world):
        assign = world.assignment("a", prompt(100))
        world.prompts[RequestId("a")] = prompt(101)
        await world.ask(assign)
        await world.clock.advance(0.5)
        assert aborts(world) == [("a", 1, "claim-lost")]


class AllAtOnce(World):
    """Its router answers a claim with the whole prompt."""

    async def _claimed(self, _subject: str, payload: bytes) -> bytes:
        return self.prompts[Claim.model_validate_json(payload).request].astype("<u4").tobytes()


async def test_a_claim_reply_that_is_larger_than_agreed_is_not_taken() -> None:
    world = AllAtOnce(node=replace(SMALL, blocks_per_rank=8_192))
    async with running(world):
        await world.ask(world.assignment("a", prompt(70_000)))
        await world.clock.advance(0.5)
        assert aborts(world) == [("a", 1, "claim-lost")]


# --- blocks


async def test_the_fold_of_the_cache_events_is_what_the_worker_holds() -> None:
    """Prompts that overlap and overflow: evictions, reuse and stores, then a report, all folded by the shared fold."""
    world = World()
    async with running(world):
        for index in range(30):
            tokens = prompt(300 + 16 * (index % 5), seed=index % 7)
            await world.ask(world.assignment(f"r{index}", tokens, at=worker(index % 2)))
            await world.clock.advance(0.5)
        assert world.events(BlocksEvicted), "the test must reach eviction"
        assert holdings(world) == held_by_engine(world)
        await world.ask(Report())
        assert holdings(world) == held_by_engine(world)
        assert len(world.events(CacheReported)) == 3 + 3


async def test_a_report_in_the_middle_of_a_step_is_of_what_was_told_before_it() -> None:
    """The step has made room when it began, and would name what went at its end."""
    world = World()
    async with running(world):
        for index in range(8):
            await world.ask(world.assignment(f"r{index}", prompt(400, seed=index)))
            await world.clock.advance(0.5)
        told = len(world.events(BlocksEvicted))
        await world.ask(world.assignment("big", prompt(900, seed=99)))
        await world.clock.advance(0.001)
        assert world.events(PrefillStarted)[-1].request == "big"
        assert len(world.events(BlocksEvicted)) == told
        await world.ask(Report())
        assert len(world.events(BlocksEvicted)) > told, "the step must have made room"
        assert holdings(world) == held_by_engine(world)
        await world.clock.advance(0.5)
        assert holdings(world) == held_by_engine(world)
        assert folded_holders(world).drifted_blocks == 0


def held_by_engine(world: World) -> dict[str, set[bytes]]:
    served = world.state.served.workers(world.state.node)
    runs = {each: world.engines[-1].resident(group).runs for each, group in served.items()}
    return {each: {block for _, blocks in found for block in blocks} for each, found in runs.items()}


def holdings(world: World) -> dict[str, set[bytes]]:
    holders = folded_holders(world)
    return {each: {block for block, _ in holders.index.held(each)} for each in holders.workers}


def folded_holders(world: World) -> Holders:
    holders = Holders()
    for stored in [*world.receipts(), *world.folded()]:
        holders_model.evolve(holders, stored)
    holders.check()
    assert all(held.trust == "exact" for held in holders.workers.values())
    return holders


async def test_a_prompt_that_no_eviction_makes_room_for_is_given_back() -> None:
    world = World()
    async with running(world):
        await world.ask(world.assignment("big", prompt(65 * BLOCK_TOKENS)))
        await world.clock.advance(0.1)
        assert aborts(world) == [("big", 1, "out-of-blocks")]
        assert world.of("big")[0].error == "out-of-blocks"
        await world.ask(world.assignment("big", prompt(65 * BLOCK_TOKENS), attempt=2, at=worker(2)))
        await world.clock.advance(2.0)
        assert len(world.events(PrefillCompleted)) == 1


async def test_a_worker_runs_one_step_and_workers_run_side_by_side() -> None:
    world = World()
    async with running(world):
        for index, rank in enumerate((0, 0, 1, 2)):
            await world.ask(world.assignment(f"r{index}", prompt(100, seed=index), at=worker(rank)))
        await world.clock.advance(0.15)
        assert {each.request for each in world.events(PrefillCompleted)} == {"r0", "r2", "r3"}
        await world.clock.advance(0.1)
        second = world.events(PrefillStarted)[-1]
        assert (second.request, second.queue_us) == ("r1", 100_000)


async def test_a_rebalanced_request_is_taken_by_an_idle_worker_only() -> None:
    world = World()
    async with running(world):
        assert (await world.ask(world.assignment("a", prompt(100), rebalanced=True))).kind == "accepted"
        assert (await world.ask(world.assignment("b", prompt(100), rebalanced=True))).reason == "not-idle"
        await world.clock.advance(1.0)
        assert (await world.ask(world.assignment("c", prompt(100), rebalanced=True))).kind == "accepted"
