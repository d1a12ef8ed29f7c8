"""A queued request goes to a worker that has nothing to do: a router in memory and agents that follow a script."""

import asyncio
from pathlib import Path

from router_front import Agent, Front, continuation, front, serve, serve_when_told, tokens_of

from services.router.calls import Call
from shared.contracts.commands import Assign
from shared.contracts.events import ParametersChanged, RequestCompleted, RequestRedirected
from shared.contracts.ids import NodeId
from shared.model.cost import Coefficients
from tests.support.replica import eventually

SLOW = Coefficients(version="slow", d=1.0, a=0.0, b=0.0, c=0.0, alpha=0.0)
"""Every prompt takes a second, so whoever waits for another gains by a move."""

PROMPTS = [[100 + number, 200, 300] for number in range(3)]


async def queued(router: Front, busy: Agent) -> list[Call]:
    """Three requests in the queue of the only worker that there is."""
    changes = {"placement_policy": "vertumnus", "in_flight_prefixes": False}
    fact = ParametersChanged(parameters_version=1, changes=changes, asked_by="t")
    await router.tell(fact, sender="controller", source="controller")
    await busy.start((4,))
    calls = [await router.submit(prompt) for prompt in PROMPTS]
    await eventually(lambda: len(busy.assigns) == len(PROMPTS))
    return calls


async def test_those_who_wait_go_to_the_idle_worker_until_nobody_gains(tmp_path: Path) -> None:
    async with front(tmp_path, SLOW) as router:
        busy, idle = Agent(router, "n0", serve_when_told), Agent(router, "n1")
        calls = await queued(router, busy)
        await idle.start((4,))
        await eventually(lambda: len(router.told(RequestCompleted)) == 2)
        [begin] = busy.queued.values()
        begin.set()
        assert [await tokens_of(call) for call in calls] == [continuation(prompt, 8) for prompt in PROMPTS]
        await router.settled()
        moved = router.told(RequestRedirected)
        assert [(each.reason, each.worker) for each in moved] == [("rebalanced", "n0/1/0")] * 2
        assert all(each.rebalanced and each.attempt == 2 for each in idle.assigns)
        assert not any(each.rebalanced for each in busy.assigns)


async def test_who_is_refused_there_goes_on_elsewhere(tmp_path: Path) -> None:
    async with front(tmp_path, SLOW) as router:
        busy, idle = Agent(router, "n0", serve_when_told), Agent(router, "n1", serve_when_told)
        idle.refusals = ["not-idle"]
        calls = await queued(router, busy)
        await idle.start((4,))
        await eventually(lambda: any(each.attempt == 3 for each in [*busy.assigns, *idle.assigns]))
        reasons = [each.reason for each in router.told(RequestRedirected)]
        assert reasons[:2] == ["rebalanced", "full"]
        answers = [asyncio.ensure_future(tokens_of(call)) for call in calls]
        while not all(answer.done() for answer in answers):
            for agent in (busy, idle):
                for begin in agent.queued.values():
                    begin.set()
            await asyncio.sleep(0.01)
        assert [answer.result() for answer in answers] == [continuation(prompt, 8) for prompt in PROMPTS]


async def test_who_has_started_stays(tmp_path: Path) -> None:
    """The router does not know it yet: the agent's word counts."""
    begin = asyncio.Event()

    async def serve_later(agent: Agent, assign: Assign) -> None:
        await begin.wait()
        await serve(agent, assign)

    async with front(tmp_path, SLOW) as router:
        busy, idle = Agent(router, "n0", serve_later), Agent(router, "n1")
        calls = await queued(router, busy)
        await idle.start((4,))
        await eventually(lambda: bool(busy.released))
        begin.set()
        assert [await tokens_of(call) for call in calls] == [continuation(prompt, 8) for prompt in PROMPTS]
        await router.settled()
        assert router.told(RequestRedirected) == []
        assert not idle.assigns


async def test_who_does_not_answer_keeps_what_it_has_and_the_idle_worker_is_not_kept_for_it(tmp_path: Path) -> None:
    async with front(tmp_path, SLOW, ack_timeout_s=0.1) as router:
        busy, idle = Agent(router, "n0", serve_when_told), Agent(router, "n1")
        calls = await queued(router, busy)
        busy.silent_on_release = True
        await idle.start((4,))
        await eventually(lambda: len(busy.released) == 3)
        assert {request for request, _ in busy.released} == {call.request for call in calls}, "each is asked once"
        assert NodeId("n1") in router.state.pool.alive
        for start in list(busy.queued.values()):
            start.set()
        assert [await tokens_of(call) for call in calls] == [continuation(prompt, 8) for prompt in PROMPTS]
        await router.settled()
        assert router.told(RequestRedirected) == []
