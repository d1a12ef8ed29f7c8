"""What becomes of a request when agents refuse, are silent, lose frames or die: it ends once, and its answer is whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from router_front import (
    SOURCE,
    STOP_TOKEN,
    SUBJECTS,
    Agent,
    continuation,
    front,
    serve_some,
    serve_when_told,
    tokens_of,
)
from router_world import committed, registered

from services.router import dispatch, placing_again
from services.router.calls import NotReceived, Unserved
from services.router.frames import Broken
from shared.contracts.commands import PROMPT_BLOCKS_MAX, Assign, Claim, RouterAlive, SamplingSpec, encode_message
from shared.contracts.envelope import Envelope
from shared.contracts.events import (
    ENDS,
    Cordoned,
    NodeDeclaredLost,
    PrefillStarted,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestReceived,
    RequestRedirected,
    RequestRejected,
    RouterLost,
    RouterRegistered,
    Uncordoned,
)
from shared.contracts.ids import BlockId, NodeId, RequestId, RouterId
from shared.model.cost import Coefficients
from shared.runtime.outbox import OutboxFull
from tests.support.replica import eventually

PROMPT = [11, 12, 13, 14]


async def test_a_request_is_served_and_recorded(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        agent = Agent(router, "n0")
        await agent.start((4, 4))
        call = await router.submit(PROMPT)
        assert await tokens_of(call) == continuation(PROMPT, 8)
        await router.settled()
        [assign] = agent.assigns
        assert (assign.attempt, assign.prompt_tokens, assign.max_new_tokens) == (1, 4, 8)
        assert assign.decode_worker == "n0/decode/0"
        [done] = router.told(RequestCompleted)
        assert (done.output_tokens, done.queue_us, done.prefill_us, done.finish) == (8, 3, 5, "length")
        assert done.ttft_us == done.queue_us + done.prefill_us + done.handoff_us
        later_us = (call.last_token_ns - call.order.arrived_ns) / 1_000 - done.ttft_us
        assert done.tpot_us == pytest.approx(later_us / 7, abs=1), "seven tokens follow the first"
        assert router.told(RouterRegistered)
        assert not router.state.loads.open


async def test_no_command_leaves_before_the_decision_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(tmp_path) as router:
        agent = Agent(router, "n0")
        await agent.start((4,))
        append, gate = router.log.append, asyncio.Event()

        async def append_late(*args: Any) -> int:
            await gate.wait()
            return await append(*args)

        monkeypatch.setattr(router.log, "append", append_late)
        call = await router.submit(PROMPT)
        await asyncio.sleep(0.05)
        assert not agent.assigns
        gate.set()
        assert await tokens_of(call) == continuation(PROMPT, 8)


@pytest.mark.parametrize("reason", ["draining", "stale-epoch", "unknown-worker", "full"])
async def test_a_refusal_goes_elsewhere(tmp_path: Path, reason: str) -> None:
    async with front(tmp_path) as router:
        agent = Agent(router, "n0")
        agent.refusals = [reason]  # type: ignore[list-item]
        await agent.start((4, 4))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        first, second = agent.assigns
        assert (second.attempt, second.worker != first.worker) == (2, True)
        await router.settled()
        [redirected] = router.told(RequestRedirected)
        assert (redirected.reason, redirected.worker) == (reason, first.worker)


async def test_silence_goes_elsewhere_and_is_given_up(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        silent, agent = Agent(router, "n0"), Agent(router, "n1")
        silent.silent = True
        await silent.start((4,))
        await agent.start((4,))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        assert [each.reason for each in router.told(RequestRedirected)] == ["no-reply"]
        assert silent.cancelled == [(silent.assigns[0].request, 1)]


async def test_of_a_dead_agent_no_second_worker_is_asked(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        await router.tell(registered("n0", 4, epoch=1, composition=(1, 1, 1, 1)), sender="n0")
        await router.tell(committed((1, 1, 1, 1), "n0"), sender="controller", source="controller")
        await Agent(router, "n1").start((1,))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        [redirected] = router.told(RequestRedirected)
        assert (redirected.worker, redirected.reason, redirected.node_silent) == ("n0/1/0", "no-reply", True)
        second = router.told(RequestAssigned)[1]
        assert (second.worker, second.excluded) == ("n1/1/0", {"silent": 4})


async def test_while_the_only_agent_restarts_a_request_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing_again, "SILENCE_S", 60.0)
    async with front(tmp_path) as router:
        await router.tell(registered("n0", 4, epoch=1, composition=(4,)), sender="n0")
        await router.tell(committed((4,), "n0"), sender="controller", source="controller")
        call = await router.submit(PROMPT)
        await eventually(lambda: router.told(RequestRedirected))
        await router.bus.subscribe(SUBJECTS.agent(NodeId("n0")), (agent := Agent(router, "n0"))._obey)
        await agent.tell(registered("n0", 4, incarnation=2, epoch=1, composition=(4,)))
        assert await tokens_of(call) == continuation(PROMPT, 8)
        await router.settled()
        assert [each.attempt for each in router.told(RequestAssigned)] == [1, 2]


async def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing_again, "SILENCE_S", 0.01)
    async with front(tmp_path) as router:
        await router.tell(registered("n0", 4, epoch=1, composition=(4,)), sender="n0")
        await router.tell(committed((4,), "n0"), sender="controller")
        with pytest.raises(Unserved) as failure:
            await router.answer(PROMPT)
        assert failure.value.reason == "attempts-exhausted"
        await router.settled()
        assert [each.attempt for each in router.told(RequestAssigned)] == [1, 2, 3, 4]
        assert [each.reason for each in router.told(RequestFailed)] == ["attempts-exhausted"]


@pytest.mark.parametrize("by_frame", [False, True])
@pytest.mark.parametrize(
    ("reason", "called"),
    [
        ("claim-lost", "claim-lost"),
        ("draining", "draining"),
        ("engine-died", "node-lost"),
        ("out-of-blocks", "full"),
        ("engine", "aborted"),
    ],
)
async def test_an_attempt_that_breaks_off_goes_elsewhere(
    tmp_path: Path, reason: str, called: str, by_frame: bool
) -> None:
    """The log says why, and so does a frame, which is faster: the record names the same reason."""
    async with front(tmp_path) as router:

        async def break_off(agent: Agent, assign: Assign) -> None:
            if assign.attempt > 1:
                await serve_some(agent, assign, 8)
            elif by_frame:
                await agent.frame(assign, 0, [], error=reason)
            else:
                await agent.abort(assign, reason)

        agent = Agent(router, "n0", break_off)
        await agent.start((4, 4))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        assert [each.reason for each in router.told(RequestRedirected)] == [called]
        assert agent.cancelled == [], "it has ended the attempt itself"


async def test_a_node_that_dies_before_the_first_token(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def nothing(agent: Agent, assign: Assign) -> None:
            await agent.claim(assign)

        dying, agent = Agent(router, "n0", nothing), Agent(router, "n1")
        await dying.start((4,))
        await agent.start((4,))
        call = await router.submit(PROMPT)
        await asyncio.sleep(0.02)
        await dying.die()
        assert await tokens_of(call) == continuation(PROMPT, 8)


async def test_what_goes_on_elsewhere_says_how_much_of_it_was_generated(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def some(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 3)

        dying, agent = Agent(router, "n0", some), Agent(router, "n1")
        await dying.start((4,))
        await agent.start((4,))
        call = await router.submit(PROMPT, sampling=SamplingSpec(min_tokens=5))
        await eventually(lambda: len(call.generated) == 3)
        await dying.die()
        assert len(await tokens_of(call)) == 8
        told = [(each.generated_tokens, each.sampling.min_tokens) for each in (dying.assigns[0], agent.assigns[0])]
        assert told == [(0, 5), (3, 2)]


async def test_nobody_goes_on_inside_an_answer_that_a_grammar_binds(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def some(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 3)

        dying, agent = Agent(router, "n0", some), Agent(router, "n1")
        await dying.start((4,))
        await agent.start((4,))
        call = await router.submit(PROMPT, sampling=SamplingSpec(json_schema="{}"))
        await eventually(lambda: len(call.generated) == 3)
        await dying.die()
        with pytest.raises(Unserved, match="response_format") as failure:
            await tokens_of(call)
        assert (failure.value.reason, agent.assigns) == ("lost-stream", [])


@pytest.mark.parametrize("count", [1, 3, 7])
async def test_a_node_that_dies_behind_the_first_token_leaves_no_gap(tmp_path: Path, count: int) -> None:
    async with front(tmp_path) as router:

        async def some(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, count)

        dying, agent = Agent(router, "n0", some), Agent(router, "n1")
        await dying.start((4,))
        await agent.start((4,))
        call = await router.submit(PROMPT)
        await eventually(lambda: len(call.generated) >= count)
        await router.tell(
            NodeDeclaredLost(node=NodeId("n0"), incarnation=1, silent_us=1), sender="controller", source="controller"
        )
        assert await tokens_of(call) == continuation(PROMPT, 8)
        [again] = agent.assigns
        assert (again.attempt, again.prompt_tokens, again.max_new_tokens) == (2, 4 + count, 8 - count)
        assert agent.claims[again.request, 2] == PROMPT + continuation(PROMPT, count)
        await router.settled()
        [done] = router.told(RequestCompleted)
        assert done.output_tokens == 8


async def test_the_record_names_who_gave_the_first_token_and_how(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def once(agent: Agent, assign: Assign) -> None:
            tokens = continuation(await agent.prefill(assign), 8)
            await agent.frame(assign, 0, tokens[:1], cached_tokens=3, queue_us=4, fetch_us=2, prefill_us=5)
            await agent.frame(assign, 1, [], error="engine-died")

        await Agent(router, "n0", once).start((4,))
        await Agent(router, "n1").start((4,))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        [done] = router.told(RequestCompleted)
        assert (done.worker, done.cached_tokens) == ("n0/1/0", 3)
        assert (done.queue_us, done.fetch_us, done.prefill_us) == (4, 2, 5)
        assert done.ttft_us == 4 + 2 + 5 + done.handoff_us


async def test_what_follows_an_assignment_names_it_as_its_cause(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        envelopes: list[Envelope] = []
        router.projection.listen(lambda stored: envelopes.append(stored.event))
        agent = Agent(router, "n0")
        agent.refusals = ["full"]
        await agent.start((4, 4))
        await router.answer(PROMPT)
        await router.settled()
        first, second = [each.decision for each in agent.assigns]
        mine = [each for each in envelopes if each.source == SOURCE and each.correlation is not None]
        assert [(each.type, each.causation) for each in mine] == [
            ("request-received", None),
            ("request-assigned", None),
            ("request-redirected", first),
            ("request-assigned", first),
            ("request-completed", second),
        ]
        assert [each.id for each in mine if each.type == "request-assigned"] == [first, second]
        assert len({each.correlation for each in mine}) == 1


async def test_a_restarted_incarnation_that_nobody_saw_die(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        lives: list[int] = []

        async def die_once(agent: Agent, assign: Assign) -> None:
            lives.append(assign.attempt)
            await serve_some(agent, assign, 2 if len(lives) == 1 else 8)

        agent = Agent(router, "n0", die_once)
        await agent.start((4,))
        call = await router.submit(PROMPT)
        await eventually(lambda: len(call.generated) >= 2)
        await agent.tell(registered("n0", 4, incarnation=2, epoch=1, composition=(4,)))
        assert await tokens_of(call) == continuation(PROMPT, 8)
        assert lives == [1, 2]


async def test_lost_doubled_and_disordered_frames(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def chaotic(agent: Agent, assign: Assign) -> None:
            tokens = continuation(await agent.prefill(assign), assign.max_new_tokens)
            if assign.attempt == 1:
                for index in (0, 2, 1, 1, 0):
                    await agent.frame(assign, index, [tokens[index]])
                await agent.frame(assign, 1, tokens[1:4])
                await agent.frame(assign, 5, tokens[5:])  # the frame with token 4 is lost
            else:
                await agent.frame(assign, 0, tokens, finish="length")

        agent = Agent(router, "n0", chaotic)
        await agent.start((4, 4))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        assert [each.reason for each in router.told(RequestRedirected)] == ["no-reply"]
        assert agent.cancelled == [(agent.assigns[0].request, 1)]


async def test_a_stream_that_falls_silent_is_given_up_and_goes_on_elsewhere(tmp_path: Path) -> None:
    async with front(tmp_path, idle_timeout_s=0.1) as router:

        async def fall_silent(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 3 if assign.attempt == 1 else assign.max_new_tokens)

        agent = Agent(router, "n0", fall_silent)
        await agent.start((4, 4))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        assert [each.reason for each in router.told(RequestRedirected)] == ["no-reply"]
        assert agent.cancelled == [(agent.assigns[0].request, 1)], "it would decode for nobody"


async def test_frames_of_an_attempt_that_was_given_up_are_dropped(tmp_path: Path) -> None:
    async with front(tmp_path) as router:
        late: list[Assign] = []

        async def behave(agent: Agent, assign: Assign) -> None:
            if not late:
                late.append(assign)
                await agent.frame(assign, 0, [], error="broke off")
                return
            await agent.frame(late[0], 0, [66, 66, 66], finish="length")
            await serve_some(agent, assign, 8)

        await Agent(router, "n0", behave).start((4, 4))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)


async def test_late_words_on_an_attempt_that_was_given_up_change_nothing(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def only_the_second(agent: Agent, assign: Assign) -> None:
            [first] = silent.assigns
            assert await agent.claim(first) == []
            await silent.abort(first, "released")
            await serve_some(agent, assign, 8)

        silent, agent = Agent(router, "n0"), Agent(router, "n1", only_the_second)
        silent.silent = True
        await silent.start((4,))
        await agent.start((4,))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)
        await router.settled()
        assert [each.reason for each in router.told(RequestRedirected)] == ["no-reply"]


async def test_a_client_that_had_enough_and_leaves_has_completed(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def endless(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 3)

        await Agent(router, "n0", endless).start((4,))
        call = await router.submit(PROMPT)
        await eventually(lambda: len(call.generated) >= 3)
        call.enough()
        call.leave()
        await router.settled()
        assert len(router.told(RequestCompleted)) == 1
        assert not router.told(RequestCancelled)


async def test_a_client_that_had_enough_needs_no_other_worker(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def endless(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 3)

        await Agent(router, "n0", endless).start((4, 4))
        call = await router.submit(PROMPT)
        await eventually(lambda: len(call.generated) >= 3)
        call.inbox.put(Broken(1, "node-lost"))
        call.enough()
        await router.settled()
        [done] = router.told(RequestCompleted)
        assert (done.finish, router.told(RequestRedirected)) == ("stop", [])


async def test_an_answer_whose_last_frame_is_lost_is_whole(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def no_last_word(agent: Agent, assign: Assign) -> None:
            await agent.frame(assign, 0, [1, 2, STOP_TOKEN])
            await agent.frame(assign, 3, [], error="broke off")

        await Agent(router, "n0", no_last_word).start((4,))
        assert await router.answer(PROMPT) == [1, 2, STOP_TOKEN]
        await router.settled()
        [done] = router.told(RequestCompleted)
        assert done.finish == "stop"


async def test_no_first_token_in_time_is_a_clear_failure(tmp_path: Path) -> None:
    async with front(tmp_path, first_token_slack_s=0.2) as router:

        async def hang(agent: Agent, assign: Assign) -> None:
            await agent.claim(assign)

        agent = Agent(router, "n0", hang)
        await agent.start((4,))
        with pytest.raises(Unserved) as failure:
            await router.answer(PROMPT)
        assert failure.value.reason == "lost-stream"
        await router.settled()
        assert [each.reason for each in router.told(RequestFailed)] == ["lost-stream"]
        assert agent.cancelled == [(agent.assigns[0].request, 1)]


async def test_a_request_that_others_overtake_is_waited_for(tmp_path: Path) -> None:
    """The worker serves another one meanwhile; when it has fallen silent, or has nobody else, the wait is over."""
    async with front(tmp_path, first_token_slack_s=0.2) as router:
        seen: list[Assign] = []

        async def one_for_long(agent: Agent, assign: Assign) -> None:
            await agent.claim(assign)
            seen.append(assign)
            if len(seen) == 1:
                await agent.tell(
                    PrefillStarted(request=assign.request, attempt=assign.attempt, worker=assign.worker, queue_us=0)
                )
                await eventually(lambda: len(seen) == 2)
                await asyncio.sleep(1.5)
                for each in seen:
                    await serve_some(agent, each, 8)

        await Agent(router, "n0", one_for_long).start((4,))
        first = await router.submit(PROMPT)
        await eventually(lambda: len(seen) == 1)
        second = await router.submit([9, *PROMPT])
        assert await tokens_of(first) == continuation(PROMPT, 8)
        assert await tokens_of(second) == continuation([9, *PROMPT], 8)


async def test_a_first_token_is_given_twice_its_predicted_time(tmp_path: Path) -> None:
    slow = Coefficients(version="slow", d=2.5, a=0.0, b=0.0, c=0.0, alpha=0.0)
    async with front(tmp_path, slow, first_token_slack_s=0.1) as router:

        async def late(agent: Agent, assign: Assign) -> None:
            await asyncio.sleep(3.0)
            await serve_some(agent, assign, 8)

        await Agent(router, "n0", late).start((4,))
        assert await router.answer(PROMPT) == continuation(PROMPT, 8)


async def test_a_client_that_leaves(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def hang(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 2)

        agent = Agent(router, "n0", hang)
        await agent.start((4,))
        call = await router.submit(PROMPT)
        await anext(call.pieces())
        call.leave()
        call.leave()
        await router.settled()
        assert len(router.told(RequestCancelled)) == 1
        assert agent.cancelled == [(call.request, 1)]
        assert not router.state.loads.open


async def test_a_client_that_does_not_read(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def flood(agent: Agent, assign: Assign) -> None:
            for index in range(20):
                await agent.frame(assign, index * 1_000, [5] * 1_000)

        agent = Agent(router, "n0", flood)
        await agent.start((4,))
        call = await router.submit(PROMPT, max_tokens=50_000)
        await router.settled()
        assert len(call.generated) <= 9_000
        assert len(router.told(RequestCancelled)) == 1
        with pytest.raises(Unserved, match="does not read"):
            await tokens_of(call)


async def test_a_stop_string_cancels_the_rest(tmp_path: Path) -> None:
    async with front(tmp_path) as router:

        async def endless(agent: Agent, assign: Assign) -> None:
            await serve_some(agent, assign, 3)

        agent = Agent(router, "n0", endless)
        await agent.start((4,))
        call = await router.submit(PROMPT)
        await eventually(lambda: len(call.generated) >= 3)
        call.enough()
        assert await tokens_of(call) == continuation(PROMPT, 3)
        await router.settled()
        assert agent.cancelled == [(call.request, 1)]
        [done] = router.told(RequestCompleted)
        assert (done.finish, done.output_tokens) == ("stop", 3)


async def test_a_reader_does_not_hang_when_no_end_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tmp_path) as router:
        await Agent(router, "n0").start((4,))
        call = await router.submit(PROMPT)

        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(router.outbox, "record", broken)
        with pytest.raises(Unserved) as failure:
            await tokens_of(call)
        assert failure.value.reason == "internal"
        assert router.dispatcher.open_requests == 0


async def test_an_end_that_the_log_had_no_room_for_is_recorded_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tmp_path) as router:
        agent = Agent(router, "n0", serve_when_told)
        await agent.start((4,))
        calls = [await router.submit(PROMPT) for _ in range(2)]
        await eventually(lambda: len(agent.queued) == 2)

        def full(*_: object) -> None:
            raise OutboxFull("full")

        with monkeypatch.context() as standing_still:
            standing_still.setattr(router.outbox, "record", full)
            calls[0].leave()
            agent.queued[calls[1].request, 1].set()
            await tokens_of(calls[1])
            await eventually(lambda: router.dispatcher.open_requests == 0)
            assert len(router.state.loads.open) == 2, "what they reserve holds until the record has their ends"
        await eventually(lambda: not router.state.loads.open)
        await eventually(lambda: len(router.told(RequestCompleted)) == 1)
        assert [each.request for each in router.told(RequestCancelled)] == [calls[0].request]


async def test_a_router_that_stops_waits_for_room_for_the_ends_that_it_owes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tmp_path, drain_s=0.01) as router:
        agent = Agent(router, "n0", serve_when_told)
        await agent.start((4,))
        call = await router.submit(PROMPT)
        await eventually(lambda: len(agent.queued) == 1)
        tried = asyncio.Event()

        def full(*_: object) -> None:
            tried.set()
            raise OutboxFull("full")

        with monkeypatch.context() as standing_still:
            standing_still.setattr(router.outbox, "record", full)
            router.dispatcher._heart.cancel()
            draining = asyncio.ensure_future(router.dispatcher.drain())
            await asyncio.wait_for(tried.wait(), 30)
            await eventually(lambda: call.is_closed)
            assert not draining.done(), "the end of its request is owed"
        await asyncio.wait_for(draining, 30)
        assert [(each.request, each.reason) for each in router.told(RequestFailed)] == [(call.request, "shutdown")]
        assert not router.state.loads.open


class TestNoWorker:
    async def test_waits_for_one(self, tmp_path: Path) -> None:
        async with front(tmp_path, no_worker_wait_s=30) as router:
            asking = asyncio.ensure_future(router.answer(PROMPT))
            await asyncio.sleep(0.05)
            assert not router.told(RequestReceived)
            await Agent(router, "n0").start((4,))
            assert await asyncio.wait_for(asking, 60) == continuation(PROMPT, 8)

    async def test_waits_for_the_end_of_a_cordon(self, tmp_path: Path) -> None:
        async with front(tmp_path, no_worker_wait_s=30) as router:
            await Agent(router, "n0").start((4,))
            ops = {"node": NodeId("n0"), "asked_by": "ops"}
            await router.tell(Cordoned(**ops), sender="controller", source="controller")
            asking = asyncio.ensure_future(router.answer(PROMPT))
            await asyncio.sleep(0.05)
            assert not asking.done()
            await router.tell(Uncordoned(**ops), sender="controller", source="controller")
            assert await asyncio.wait_for(asking, 60) == continuation(PROMPT, 8)

    async def test_refuses_after_a_while(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:
            with pytest.raises(Unserved) as failure:
                await router.answer(PROMPT)
            assert (failure.value.reason, failure.value.retry_after_s) == ("no-worker", 5)
            await router.settled()
            assert [each.reason for each in router.told(RequestRejected)] == ["no-worker"]

    async def test_a_prompt_that_fits_nowhere_does_not_wait(self, tmp_path: Path) -> None:
        async with front(tmp_path, no_worker_wait_s=60) as router:
            await Agent(router, "n0").start((4,), prompt_tokens_max=3)
            with pytest.raises(Unserved) as failure:
                await router.answer(PROMPT)
            assert failure.value.reason == "too-long"

    async def test_a_prompt_of_more_blocks_than_a_message_can_name_is_refused(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:
            with pytest.raises(NotReceived, match="has 32769 blocks; 32768 at most") as failure:
                await router.submit(PROMPT, chain=(BlockId(bytes(16)),) * (PROMPT_BLOCKS_MAX + 1))
            assert (failure.value.reason, router.dispatcher.open_requests) == ("too-long", 0)

    async def test_the_last_worker_leaves(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:

            async def one(agent: Agent, assign: Assign) -> None:
                await serve_some(agent, assign, 1)

            agent = Agent(router, "n0", one)
            await agent.start((4,))
            call = await router.submit(PROMPT)
            await anext(call.pieces())
            await agent.die()
            with pytest.raises(Unserved) as failure:
                await tokens_of(call)
            assert failure.value.reason == "no-worker"
            await router.settled()
            assert [each.reason for each in router.told(RequestFailed)] == ["no-worker"]


class TestBounds:
    async def test_open_requests(self, tmp_path: Path) -> None:
        async with front(tmp_path, open_requests_max=2) as router:
            slots = [router.dispatcher.enter() for _ in range(2)]
            with pytest.raises(NotReceived, match="which is the limit") as refused:
                router.dispatcher.enter()
            assert (refused.value.reason, refused.value.retry_after_s) == ("overloaded", 5), (
                "nothing is known of workers"
            )
            slots[0].release()
            slots[0].release()
            router.dispatcher.enter().release()
            slots[1].release()
            assert router.dispatcher.open_requests == 0

    async def test_who_finds_no_place_is_told_when_a_worker_is_predicted_to_have_room(self, tmp_path: Path) -> None:
        long = Coefficients(version="long", d=10.0, a=0.0, b=0.0, c=0.0, alpha=0.0)
        async with front(tmp_path, long, open_requests_max=2) as router:
            agent = Agent(router, "n0", serve_when_told)
            await agent.start((4,))
            calls = [await router.submit(PROMPT) for _ in range(2)]
            await eventually(lambda: len(agent.queued) == 2)
            with pytest.raises(NotReceived, match="which is the limit") as refused:
                router.dispatcher.enter()
            assert refused.value.retry_after_s == 20
            for begin in agent.queued.values():
                begin.set()
            for call in calls:
                await tokens_of(call)

    async def test_a_log_that_does_not_keep_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is received while the ends of what is open need the room that the outbox has."""
        async with front(tmp_path) as router:
            await Agent(router, "n0").start((4,))
            append, gate = router.log.append, asyncio.Event()

            async def append_late(*args: Any) -> int:
                await gate.wait()
                return await append(*args)

            monkeypatch.setattr(router.log, "append", append_late)
            monkeypatch.setattr(dispatch, "OUTBOX_SHARE_MAX", 1)
            call = await router.submit(PROMPT)
            with pytest.raises(NotReceived, match="does not keep up") as refused:
                router.dispatcher.enter()
            assert refused.value.reason == "overloaded"
            gate.set()
            assert await tokens_of(call) == continuation(PROMPT, 8)

    async def test_prompts_held(self, tmp_path: Path) -> None:
        async with front(tmp_path, token_buffer_bytes_max=2**20) as router:
            await Agent(router, "n0").start((4,), prompt_tokens_max=10**6, blocks_per_rank=10**6)
            with pytest.raises(NotReceived, match="of prompts are held"):
                await router.answer([5] * (2**18 + 1))
            assert not router.told(RequestReceived)
            assert router.dispatcher.open_requests == 0
            assert len(await router.answer([5] * 2**18, 1)) == 1

    async def test_claims_come_in_frames_and_only_for_the_live_attempt(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:
            agent = Agent(router, "n0")
            await agent.start((4,), prompt_tokens_max=10**6, blocks_per_rank=10**6)
            prompt = list(range(10, 70_010))
            call = await router.submit(prompt, 1)
            await tokens_of(call)
            assert agent.claims[call.request, 1] == prompt
            await router.settled()
            claim = encode_message(Claim(request=RequestId(call.request), attempt=1, offset=0))
            assert await router.bus.request(SUBJECTS.claim(RouterId(SOURCE)), claim, 1.0) == b""
            assert await router.bus.request(SUBJECTS.claim(RouterId(SOURCE)), b"nonsense", 1.0) == b""


class TestLife:
    async def test_drain_lets_open_requests_end(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:

            async def slow(agent: Agent, assign: Assign) -> None:
                await asyncio.sleep(0.2)
                await serve_some(agent, assign, 8)

            await Agent(router, "n0", slow).start((4,))
            call = await router.submit(PROMPT)
            draining = asyncio.ensure_future(router.dispatcher.drain())
            await asyncio.sleep(0)
            with pytest.raises(NotReceived) as refused:
                router.dispatcher.enter()
            assert refused.value.reason == "shutdown"
            assert router.dispatcher.not_ready() == "draining"
            assert await tokens_of(call) == continuation(PROMPT, 8)
            await draining
            assert len(router.told(RequestCompleted)) == 1

    async def test_drain_fails_what_takes_too_long(self, tmp_path: Path) -> None:
        async with front(tmp_path, drain_s=0.1, idle_timeout_s=60) as router:

            async def endless(agent: Agent, assign: Assign) -> None:
                await serve_some(agent, assign, 2)

            await Agent(router, "n0", endless).start((4,))
            call = await router.submit(PROMPT)
            await asyncio.sleep(0.05)
            await router.dispatcher.drain()
            with pytest.raises(Unserved) as failure:
                await tokens_of(call)
            assert failure.value.reason == "shutdown"
            assert [each.reason for each in router.told(RequestFailed)] == ["shutdown"]

    async def test_declared_lost(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:
            failed = asyncio.ensure_future(router.dispatcher.failed())
            await router.tell(RouterLost(router=RouterId("r"), source="router-9-0000"), sender="controller")
            await asyncio.sleep(0.01)
            assert not failed.done()
            await router.tell(RouterLost(router=RouterId(SOURCE), source=SOURCE), sender="controller", source="c2")
            assert "declared" in str(await asyncio.wait_for(failed, 60))

    async def test_who_waits_is_told_that_the_router_was_declared_lost(self, tmp_path: Path) -> None:
        async def hang(agent: Agent, assign: Assign) -> None:
            await agent.claim(assign)

        async with front(tmp_path, first_token_slack_s=60) as router:
            await Agent(router, "n0", hang).start((4,))
            call = await router.submit(PROMPT)
            await router.tell(RouterLost(router=RouterId(SOURCE), source=SOURCE), sender="controller", source="c2")
            with pytest.raises(Unserved, match="ask again") as failure:
                await asyncio.wait_for(tokens_of(call), 60)
            assert (failure.value.reason, failure.value.retry_after_s) == ("shutdown", 1)
            with pytest.raises(NotReceived, match="shutting down"):
                await router.submit(PROMPT)
            call.leave()
            await router.settled()
            assert not router.told(RequestFailed) + router.told(RequestCancelled), "router-lost is the one end"

    async def test_it_says_that_it_lives(self, tmp_path: Path) -> None:
        beats: asyncio.Queue[RouterAlive] = asyncio.Queue()

        async def hear(_subject: str, payload: bytes) -> None:
            beats.put_nowait(RouterAlive.model_validate_json(payload))

        async with front(tmp_path) as router:
            await router.bus.subscribe(SUBJECTS.routers_alive, hear)
            beat = await asyncio.wait_for(beats.get(), 60)
            assert (beat.source, beat.open_requests) == (SOURCE, 0)

    async def test_every_request_of_a_rough_run_ends_once(self, tmp_path: Path) -> None:
        async with front(tmp_path) as router:
            moods = iter(range(10_000))

            async def moody(agent: Agent, assign: Assign) -> None:
                match next(moods) % 5:
                    case 0:
                        await agent.abort(assign, "out-of-blocks")
                    case 1:
                        await serve_some(agent, assign, 3)
                        await agent.frame(assign, 3, [], error="broke off")
                    case _:
                        await serve_some(agent, assign, 8)

            agents = [Agent(router, f"n{number}", moody) for number in range(3)]
            for each in agents:
                await each.start((2, 2))
            answers = await asyncio.gather(
                *(router.answer([number, 5]) for number in range(60)), return_exceptions=True
            )
            await router.settled()
            ended = [each.request for each in router.events if isinstance(each, ENDS)]
            assert len(ended) == len(set(ended)) == 60
            served = [number for number, each in enumerate(answers) if each == continuation([number, 5], 8)]
            assert len(served) == len(router.told(RequestCompleted)) >= 50
            assert not router.state.loads.open
            assert not router.state.loads.of_worker
            assert not router.state.loads.output_tokens
