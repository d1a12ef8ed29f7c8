"""What `Bus` promises, in memory and on NATS."""

import asyncio

import pytest

from shared.runtime.ports import HANDLERS_MAX, NoReply
from tests.runtime.conftest import World
from tests.runtime.reading import until


async def test_a_request_has_the_handlers_answer(world: World) -> None:
    async def echo(subject: str, payload: bytes) -> bytes:
        return subject.encode() + b" " + payload

    await world.bus.subscribe("vertumnus.test.agent.*", echo)
    assert await world.second_bus.request("vertumnus.test.agent.n0", b"hi", 1) == b"vertumnus.test.agent.n0 hi"


async def test_no_listener_is_known_at_once(world: World) -> None:
    with pytest.raises(NoReply, match="nobody listens on"):
        await world.bus.request("vertumnus.test.agent.n1", b"", 60)


async def test_a_handler_that_answers_nothing_or_fails_lets_the_request_time_out(world: World) -> None:
    async def silent(_subject: str, payload: bytes) -> bytes | None:
        if payload == b"fail":
            raise RuntimeError("this handler fails")
        return b"well" if payload == b"answer" else None

    await world.bus.subscribe("vertumnus.test.agent.n0", silent)
    for payload in (b"", b"fail"):
        with pytest.raises(NoReply, match=r"no answer .* within 0.1 s"):
            await world.second_bus.request("vertumnus.test.agent.n0", payload, 0.1)
    assert await world.second_bus.request("vertumnus.test.agent.n0", b"answer", 1) == b"well"


async def test_published_messages_start_their_handlers_in_order(world: World) -> None:
    seen: list[bytes] = []

    async def take(_subject: str, payload: bytes) -> None:
        seen.append(payload)

    await world.bus.subscribe("vertumnus.test.frames.r.>", take)
    expected = [b"%d" % number for number in range(500)]
    for payload in expected:
        await world.second_bus.publish("vertumnus.test.frames.r.1", payload)
    await until(lambda: len(seen) >= 500)
    assert seen == expected


async def test_a_slow_handler_does_not_hold_up_the_next_message(world: World) -> None:
    gate = asyncio.Event()

    async def handler(_subject: str, payload: bytes) -> bytes:
        if payload == b"slow":
            await gate.wait()
        return payload

    await world.bus.subscribe("vertumnus.test.claim.r", handler)
    slow = asyncio.create_task(world.second_bus.request("vertumnus.test.claim.r", b"slow", 5))
    await asyncio.sleep(0.02)
    assert await world.second_bus.request("vertumnus.test.claim.r", b"fast", 1) == b"fast"
    gate.set()
    assert await slow == b"slow"


async def test_handlers_at_work_are_bounded(world: World) -> None:
    gate = asyncio.Event()
    at_work = 0
    most = 0

    async def handler(_subject: str, _payload: bytes) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await gate.wait()
        at_work -= 1

    await world.bus.subscribe("vertumnus.test.load.*", handler)
    for _ in range(HANDLERS_MAX + 100):
        await world.second_bus.publish("vertumnus.test.load.n0", b"")
    await until(lambda: most >= HANDLERS_MAX)
    await asyncio.sleep(0.05)
    assert most == HANDLERS_MAX
    gate.set()
    await until(lambda: not at_work)
