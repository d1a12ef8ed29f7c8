"""Requests that wait for their tenant's turn: a router in memory and an agent that follows a script."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router_front import Agent, Front, continuation, front, serve_when_told, tokens_of
from router_world import arrival

from services.router import decider
from services.router.calls import Call, Rejected
from services.router.decider import Moment
from shared.contracts.events import (
    ParametersChanged,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestHeld,
    RequestRejected,
    RouterLost,
)
from shared.contracts.ids import RouterId, Source, TenantId
from shared.model.cost import Coefficients
from shared.runtime.outbox import OutboxFull
from tests.support.replica import eventually

SLOW = Coefficients(version="slow", d=1.0, a=0.0, b=0.0, c=0.0, alpha=0.0)
PROMPT = [11, 12, 13]


@asynccontextmanager
async def sharing(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Front, Agent]]:
    """One worker, and tenants of whom each may have one request there."""
    async with front(tmp_path, SLOW, drain_s=0.1) as router:
        agent = Agent(router, "n0", serve_when_told)
        entries = [{"tenant": "many"}, {"tenant": "few"}]
        told = ParametersChanged(
            parameters_version=1, changes={"tenants": entries, "share_s": 0, **changes}, asked_by="t"
        )
        await router.tell(told, sender="controller", source="controller")
        await agent.start((4,))
        yield router, agent


async def submit(router: Front, tenant: str) -> Call:
    return await router.submit(PROMPT, tenant=TenantId(tenant))


async def begin(agent: Agent) -> None:
    """The request that the agent has had longest goes on to its end."""
    await eventually(lambda: bool(agent.queued))
    next(iter(agent.queued.values())).set()


async def test_the_flood_waits_at_the_router_and_the_other_tenant_does_not(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, agent):
        flood = [await submit(router, "many") for _ in range(4)]
        other = await submit(router, "few")
        await eventually(lambda: len(agent.assigns) == 2)
        assert [each.request for each in agent.assigns] == [flood[0].request, other.request]
        assert [each.request for each in router.told(RequestHeld)] == [call.request for call in flood[1:]]
        answers = [asyncio.ensure_future(tokens_of(call)) for call in [*flood, other]]
        for count in range(1, 6):
            await begin(agent)
            await eventually(lambda count=count: len(router.told(RequestCompleted)) == count)  # type: ignore[misc]
        assert [await each for each in answers] == [continuation(PROMPT, 8)] * 5
        await router.settled()
        went = [each.request for each in router.told(RequestAssigned)]
        assert went == [call.request for call in [flood[0], other, *flood[1:]]], "in order, one at a time"
        held_us = {each.request: each.held_us for each in router.told(RequestCompleted)}
        assert all(held_us[call.request] > 0 for call in flood[1:])
        assert held_us[flood[0].request] == held_us[other.request] == 0
        assert not router.state.usage.waits


async def test_a_client_that_leaves_while_it_waits_ends_its_request(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, agent):
        first, second, third = [await submit(router, "many") for _ in range(3)]
        second.leave()
        await eventually(lambda: bool(router.told(RequestCancelled)))
        assert [each.request for each in router.told(RequestCancelled)] == [second.request]
        for call in (first, third):
            answer = asyncio.ensure_future(tokens_of(call))
            await begin(agent)
            assert await answer == continuation(PROMPT, 8)
        await router.settled()
        assert second.request not in [each.request for each in agent.assigns]


async def test_who_leaves_while_the_log_has_no_room_is_ended_when_its_turn_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OutboxFull("full")

    async with sharing(tmp_path) as (router, agent):
        first, second, third = [await submit(router, "many") for _ in range(3)]
        await eventually(lambda: bool(agent.queued))
        with monkeypatch.context() as patched:
            patched.setattr(router.outbox, "record", full)
            second.leave()
            await eventually(lambda: second.is_closed)
        for call in (first, third):
            answer = asyncio.ensure_future(tokens_of(call))
            await begin(agent)
            assert await answer == continuation(PROMPT, 8)
        await router.settled()
        assert [each.request for each in router.told(RequestCancelled)] == [second.request]


async def test_who_waits_too_long_is_rejected_once(tmp_path: Path) -> None:
    async with sharing(tmp_path, held_s_max=0.01) as (router, agent):
        first, second = [await submit(router, "many") for _ in range(2)]
        with pytest.raises(Rejected, match="has waited") as refused:
            await tokens_of(second)
        assert (refused.value.reason, refused.value.retry_after_s) == ("overloaded", 1)
        answer = asyncio.ensure_future(tokens_of(first))
        await begin(agent)
        await answer
        await router.settled()
        [rejected] = router.told(RequestRejected)
        assert rejected.limit is not None
        assert (rejected.request, rejected.limit.name) == (second.request, "held-us")
        assert not router.told(RequestFailed)


async def test_what_a_lost_router_leaves_free_is_given_to_those_who_wait(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, agent):
        elsewhere = arrival("r1")._replace(tenant=TenantId("many"))
        facts = decider.receive(router.state, elsewhere, Moment(router.clock.now_ns(), router.projection.seen_seq))
        await router.tell(*facts, sender="router", source="router-2-0000")
        await eventually(lambda: "r1" in router.state.loads.open)
        waiting = await submit(router, "many")
        assert list(router.state.usage.waits) == [waiting.request]
        lost = RouterLost(router=RouterId("r2"), source=Source("router-2-0000"))
        await router.tell(lost, sender="controller", source="controller")
        answer = asyncio.ensure_future(tokens_of(waiting))
        await begin(agent)
        assert await answer == continuation(PROMPT, 8)


async def test_a_router_that_ends_fails_those_who_wait(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (router, _):
        calls = [await submit(router, "many") for _ in range(2)]
        await router.dispatcher.drain()
        assert {call.failure.reason for call in calls if call.failure} == {"shutdown"}
        await router.settled()
        assert {each.request for each in router.told(RequestFailed)} == {call.request for call in calls}
