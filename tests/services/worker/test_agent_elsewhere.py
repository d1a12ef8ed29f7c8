"""Prefills that go on at another node, over the in-memory log and bus, with the modelled engine. Either side is the agent, the
other a script: the node that decodes answers `take-over`, the node that prefilled sends it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from services.worker.engine.modelled_text import Said
from services.worker.engine.protocol import Sampling
from shared.contracts.commands import (
    TAKE_OVER_LEASE_S,
    Cancel,
    Refused,
    Renew,
    Reply,
    SamplingSpec,
    TakenOver,
    TakeOver,
    decode_command,
    encode_message,
)
from shared.contracts.copy_commands import PinnedSlot
from shared.contracts.events import KvHandedOff, NodeRegistered, RouterLost
from shared.contracts.ids import NodeId, RequestId, RouterId, decode_worker_id, worker_id
from tests.services.worker.scripted import DECODE, ROUTER_SOURCE, SMALL, SUBJECTS, World, prompt, running

OTHER = NodeId("n9")
THERE = decode_worker_id(OTHER, 0)
TOKENS = prompt(100)


@dataclass
class Decoder:
    """A node that decodes: it gives `answers` in turn, the last of them again and again."""

    world: World
    answers: list[Reply | None] = field(default_factory=list)
    heard: list[object] = field(default_factory=list)

    async def listen(self) -> None:
        await self.world.bus.subscribe(SUBJECTS.agent(OTHER), self._answer)

    async def _answer(self, _subject: str, payload: bytes) -> bytes:
        command = decode_command(payload)
        self.heard.append(command)
        if isinstance(command, Cancel):
            return b""
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await self.world.clock.sleep(1_000)
        assert answer is not None, "nobody waits for so long"
        return encode_message(answer)


DECODING = TakenOver(stage="decoding", bytes=100_000, handoff_us=100_000)
ENDED = DECODING.model_copy(update={"stage": "ended"})


@asynccontextmanager
async def prefilled_for(*answers: Reply | None) -> AsyncIterator[tuple[World, Decoder]]:
    """The agent has prefilled a request and sent its first token."""
    world = World()
    async with running(world):
        decoder = Decoder(world, list(answers))
        await decoder.listen()
        assign = world.assignment("a", TOKENS, max_new_tokens=5, decode_worker=THERE)
        assert (await world.ask(assign)).kind == "accepted"
        await world.clock.advance(0.2)
        assert world.of("a")[0].index == 0
        yield world, decoder


def handed_off(world: World) -> list[KvHandedOff]:
    return [each for each in world.events(KvHandedOff) if isinstance(each, KvHandedOff)]


def pinned(world: World) -> int:
    pool = world.engines[0]._pool
    return sum(pool.counts(rank)[2] for rank in range(4))


async def test_the_prefill_is_offered_kept_until_it_is_there_and_asked_for_to_the_end() -> None:
    async with prefilled_for(TakenOver(stage="waiting"), DECODING, DECODING, ENDED) as (world, decoder):
        (offer,) = decoder.heard
        assert isinstance(offer, TakeOver)
        assert (offer.sender, offer.first_token, len(offer.slots)) == ("n0", world.of("a")[0].tokens[0], 7)
        assert (offer.assign.request, offer.assign.block_ids, offer.assign.max_new_tokens) == ("a", b"", 5)
        assert (handed_off(world), pinned(world)) == ([], 7)
        await world.clock.advance(1.0)
        (handed,) = handed_off(world)
        assert (handed.decode_worker, handed.bytes, handed.handoff_us) == (THERE, 100_000, 100_000)
        assert pinned(world) == 0
        assert len(world.state.desk) == 1, "the job is this node's to the end"
        await world.clock.advance(2.0)
        assert len(world.state.desk) == 0
        assert [type(each) for each in decoder.heard] == [TakeOver, Renew, Renew, Renew]
        await world.clock.advance(5.0)
        assert len(decoder.heard) == 4
        assert len(world.of("a")) == 1


async def test_a_cancelled_request_is_called_off_there() -> None:
    async with prefilled_for(DECODING) as (world, decoder):
        await world.clock.advance(3.0)
        assert (await world.ask(Cancel(request=RequestId("a"), attempt=1))).kind == "accepted"
        await world.clock.advance(0.1)
        assert isinstance(decoder.heard[-1], Cancel)
        assert len(world.state.desk) == 0


async def test_a_node_that_refuses_or_is_silent_breaks_the_attempt_off_and_nothing_stays_pinned() -> None:
    async with prefilled_for(Refused(reason="full", detail="no room")) as (world, _):
        assert [frame.error for frame in world.of("a")] == [None, "engine"]
        assert (handed_off(world), pinned(world), len(world.state.desk)) == ([], 0, 0)
    async with prefilled_for(DECODING, None) as (world, decoder):
        await world.clock.advance(TAKE_OVER_LEASE_S + 1.0)
        assert [(frame.index, frame.error) for frame in world.of("a")] == [(0, None), (1, "engine")]
        assert isinstance(decoder.heard[-1], Cancel), "in case that it only did not hear"
        assert len(world.state.desk) == 0


async def test_a_hand_off_that_no_message_can_name_breaks_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bus says of a prompt of very many blocks."""
    world = World()
    request = world.bus.request

    async def limited(subject: str, payload: bytes, timeout_s: float) -> bytes:
        if subject == SUBJECTS.agent(OTHER):
            raise ValueError(f"message on {subject}: 2000000 bytes; the server takes at most 1048576")
        return await request(subject, payload, timeout_s)

    monkeypatch.setattr(world.bus, "request", limited)
    async with running(world):
        assert (
            await world.ask(world.assignment("a", TOKENS, max_new_tokens=5, decode_worker=THERE))
        ).kind == "accepted"
        await world.clock.advance(1.0)
        assert [frame.error for frame in world.of("a")] == [None, "engine"]
        assert (
            await world.ask(world.assignment("b", TOKENS, max_new_tokens=5, decode_worker=DECODE))
        ).kind == "accepted"
        await world.clock.advance(5.0)
        assert world.of("b")[-1].finish == "length"
        assert len(world.events(NodeRegistered)) == 1, "the node lives on"


# --- the side that decodes

SAID = Said.of(TOKENS)
FIRST = SAID.next(Sampling(), 10_000).token


def answer_of(new_tokens: int) -> list[int]:
    """What a modelled engine says after the prompt and its first token."""
    said, answer = SAID.copy(), list[int]()
    said.say(FIRST)
    for _ in range(new_tokens):
        answer.append(said.next(Sampling(), 10_000).token)
        said.say(answer[-1])
    return answer


def take_over(world: World, max_new_tokens: int = 5, access: bytes = b"modelled@1/16", **changes: object) -> TakeOver:
    """Of a prompt that node `n9` has prefilled."""
    assign = world.assignment(
        "a", TOKENS, at=worker_id(OTHER, 1, 0), max_new_tokens=max_new_tokens, decode_worker=DECODE
    )
    slots = tuple(PinnedSlot(rank=0, index=index, generation=1) for index in range(7))
    given = assign.model_copy(update={"block_ids": b"", **changes})
    return TakeOver(sender=OTHER, assign=given, first_token=FIRST, slots=slots, access=b"%s#%d" % (access, SAID.said))


RENEW = Renew(request=RequestId("a"), attempt=1)


async def test_a_guest_is_decoded_from_the_second_token_on_and_its_end_is_told() -> None:
    world = World()
    async with running(world):
        reply = await world.ask(take_over(world), within_s=0.2)
        assert reply == DECODING.model_copy(update={"handoff_us": 100_000})
        again = await world.ask(take_over(world), within_s=0.2)
        assert isinstance(again, TakenOver)
        assert (again.bytes, again.handoff_us) == (100_000, 100_000), "a repetition begins nothing"
        await world.clock.advance(1.0)
        assert [token for frame in world.of("a") for token in frame.tokens] == answer_of(4)
        assert world.of("a")[0].index == 1
        assert world.of("a")[-1].finish == "length"
        assert await world.ask(RENEW) == ENDED.model_copy(update={"handoff_us": 100_000})
        assert (len(world.state.desk), world.events(KvHandedOff)) == (0, []), "it is the other node's job"


async def test_penalties_need_the_prompt_which_its_router_has() -> None:
    for penalty, asked in ((1.0, 0), (1.1, 1)):
        world = World()
        async with running(world):
            sampling = SamplingSpec(temperature=0.0, repetition_penalty=penalty)
            assert isinstance(await world.ask(take_over(world, sampling=sampling), within_s=0.2), TakenOver)
            assert len(world.claims) == asked
    world = World()
    async with running(world):
        command = take_over(world, sampling=SamplingSpec(presence_penalty=0.5))
        world.prompts.clear()
        reply = await world.ask(command, within_s=0.2)
        assert isinstance(reply, Refused)
        assert "its router does not give the prompt" in reply.detail


async def test_a_guest_whose_kv_takes_long_is_waited_for_in_pieces() -> None:
    world = World(node=replace(SMALL, link_bytes_per_s=5e4))  # 2 s
    async with running(world):
        assert await world.ask(take_over(world), within_s=1.0) == TakenOver(stage="waiting")
        assert isinstance(reply := await world.ask(RENEW, within_s=1.1), TakenOver)
        assert reply.stage == "decoding"


async def test_a_guest_ends_when_nobody_asks_for_it_or_its_router_is_lost_or_it_is_called_off() -> None:
    for way in ("silence", "router", "cancel"):
        world = World()
        async with running(world):
            await world.ask(take_over(world, max_new_tokens=10_000), within_s=0.2)
            await world.clock.advance(TAKE_OVER_LEASE_S - 1.0)
            assert (await world.ask(RENEW)).stage == "decoding"  # type: ignore[union-attr]
            if way == "router":
                await world.decide(RouterLost(router=RouterId("r"), source=ROUTER_SOURCE))
            elif way == "cancel":
                await world.ask(Cancel(request=RequestId("a"), attempt=1))
            await world.clock.advance(TAKE_OVER_LEASE_S + 0.5 if way == "silence" else 0.1)
            said = len(world.frames)
            await world.clock.advance(2.0)
            assert len(world.frames) == said, way
            assert (await world.ask(RENEW)).stage == "ended", way  # type: ignore[union-attr]
            assert world.engines[0]._decode._handed_off == {}, way


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"access": b"another@1/16"}, "another model"),
        ({"decode_worker": "n0/decode/4"}, "decode_worker: n0/decode/4 is none of"),
        ({"decode_worker": None}, "decode_worker: none is named"),
    ],
)
async def test_what_cannot_be_decoded_is_refused_and_nothing_was_said(changes: dict[str, object], detail: str) -> None:
    world = World()
    async with running(world):
        reply = await world.ask(take_over(world, **changes), within_s=0.2)  # type: ignore[arg-type]
        assert isinstance(reply, Refused)
        assert detail in reply.detail
        assert world.frames == []
        unknown = await world.ask(Renew(request=RequestId("nobody"), attempt=1))
        assert isinstance(unknown, Refused)


async def test_a_node_that_ends_tells_the_routers_of_its_guests() -> None:
    world = World()
    async with running(world) as agent:
        await world.ask(take_over(world, max_new_tokens=1_000), within_s=0.2)
        await world.clock.advance(1.0)
        stopping = asyncio.ensure_future(agent.stop(0.5))
        await world.clock.advance(2.0)
        assert stopping.done()
        last = world.of("a")[-1]
        assert (last.error, last.index) == ("draining", sum(len(frame.tokens) for frame in world.of("a")) + 1)


async def test_a_node_says_what_it_takes_and_that_it_hands_off() -> None:
    world = World()
    async with running(world):
        (registered,) = world.events(NodeRegistered)
        assert isinstance(registered, NodeRegistered)
        assert (registered.decode_sequences, registered.hands_off) == (1_024, True)
