"""Controllers as real processes on a real NATS server; the agents are the test's own."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from controller_world import rederive_windows

from cli.embedded.nats import EmbeddedNats
from services.controller import decider
from shared.contracts.commands import Accepted, Adopt, NodeLoad, Refused, RouterAlive, decode_command, encode_message
from shared.contracts.events import (
    Cordoned,
    EpochCommitted,
    Frozen,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeRegistered,
    ParametersChanged,
    RouterLost,
    RouterRegistered,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RouterId
from shared.runtime.appending import NO_ORIGIN, Fenced, append_once
from tests.support.replica import Replica, Witness, eventually, witness
from tests.support.story import adopted, assigned, received, registered

N0 = NodeId("n0")


@pytest.fixture
def controllers(nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[list[Replica]]:
    """Two controllers, not started."""
    replicas = [Replica("controller", nats_server, tmp_path, each) for each in ("1", "2")]
    yield replicas
    for each in replicas:
        each.stop(kill=True)


class Agent:
    """Answers `adopt` for one node as an agent does, and keeps every term it was told."""

    def __init__(self, seeing: Witness, refuse: str | None = None) -> None:
        self.commands: list[Adopt] = []
        self.refuse = refuse
        self._seeing = seeing

    async def start(self) -> None:
        await self._seeing.runtime.bus.subscribe(self._seeing.runtime.subjects.agent(N0), self._obey)
        await self._seeing.tell(registered("n0"), sender="n0")

    async def _obey(self, _subject: str, payload: bytes) -> bytes:
        command = decode_command(payload)
        assert isinstance(command, Adopt)
        self.commands.append(command)
        if self.refuse:
            return encode_message(Refused(reason=self.refuse, detail="not now"))
        await self._seeing.tell(*adopted("n0", command.epoch), sender="n0")
        return encode_message(Accepted())


async def beat(seeing: Witness, router: str) -> None:
    """Heartbeats of a router process and of node n0, until cancelled."""
    subjects = seeing.runtime.subjects
    alive = RouterAlive(router=RouterId("r"), source=router, open_requests=0)
    load = NodeLoad(node=N0, incarnation=1, epoch=1, queued={}, running={}, used_blocks=0, free_blocks=0)
    while True:
        await seeing.runtime.bus.publish(subjects.alive(RouterId("r")), encode_message(alive))
        await seeing.runtime.bus.publish(subjects.load(N0), encode_message(load))
        await asyncio.sleep(0.5)


async def test_a_standby_leads_after_the_leaders_death(nats_server: EmbeddedNats, controllers: list[Replica]) -> None:
    first, second = controllers
    async with witness(nats_server) as seeing:
        first.start()
        await eventually(lambda: seeing.all(LeadershipTaken))
        second.start()
        await eventually(second.ready)
        assert len(seeing.all(LeadershipTaken)) == 1, "a standby waits"

        os.kill(first.pid, signal.SIGSTOP)
        await eventually(lambda: len(seeing.all(LeadershipTaken)) == 2)
        os.kill(first.pid, signal.SIGCONT)
        await eventually(lambda: "no longer leading" in first.log.read_text())
        assert first.exit_status() is None, "it is a standby again"

        second.stop(kill=True)
        await eventually(lambda: len(seeing.all(LeadershipTaken)) == 3)
        terms = [each.term for each in seeing.all(LeadershipTaken)]
        assert terms == sorted(set(terms))
        assert [each.leader[:12] for each in seeing.all(LeadershipTaken)] == [
            "controller-1",
            "controller-2",
            "controller-1",
        ]
        assert first.resident_mib < 90

        # What the dead leader may have had under way: an append behind the last event that it had seen.
        runtime = seeing.runtime
        [(_, late)] = runtime.sealer("late").seal([Frozen(asked_by="an older leader")], NO_ORIGIN)
        seen_by_second = [each.stream_seq for each in seeing.events if isinstance(each.data, LeadershipTaken)][1]
        with pytest.raises(Fenced):
            await append_once(runtime.log, [late], {late.subject: seen_by_second}, runtime.clock)
        assert not seeing.all(Frozen)


async def test_a_leader_that_is_told_to_stop_hands_over_at_once(
    nats_server: EmbeddedNats, controllers: list[Replica]
) -> None:
    first, second = controllers
    async with witness(nats_server) as seeing:
        first.start()
        await eventually(lambda: seeing.all(LeadershipTaken))
        second.start()
        await eventually(second.ready)
        await asyncio.to_thread(first.stop)
        assert await eventually(lambda: len(seeing.all(LeadershipTaken)) == 2) < 1.5


async def test_a_node_gets_its_first_epoch(nats_server: EmbeddedNats, controllers: list[Replica]) -> None:
    async with witness(nats_server) as seeing:
        agent = Agent(seeing)
        await agent.start()
        controllers[0].start()
        await eventually(lambda: seeing.all(EpochCommitted))
        [epoch] = seeing.all(EpochCommitted)
        assert (epoch.node, epoch.epoch, epoch.composition) == ("n0", 1, (1, 1, 2, 4))
        assert {each.capacity_us for each in epoch.workers} == {14_000_000}
        [taken] = seeing.all(LeadershipTaken)
        assert [(each.epoch, each.term) for each in agent.commands] == [(1, taken.term)]


async def test_the_silent_are_lost_but_not_because_the_controller_was_deaf(
    nats_server: EmbeddedNats, controllers: list[Replica]
) -> None:
    async with witness(nats_server) as seeing:
        router = seeing.runtime.source
        await seeing.tell(RouterRegistered(router=RouterId("r")), sender=router)
        await seeing.tell(registered("n0"), sender="n0")
        controllers[0].start()
        beats = asyncio.create_task(beat(seeing, router))
        await eventually(lambda: seeing.all(LeadershipTaken))

        await asyncio.sleep(5.5)  # beyond the grace of a new leader
        nats_server.stop(kill=True)
        await asyncio.sleep(3.5)
        nats_server.start()
        await asyncio.sleep(6)  # beyond the grace after a deafness
        assert not seeing.all(NodeDeclaredLost)
        assert not seeing.all(RouterLost)

        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        await eventually(lambda: seeing.all(NodeDeclaredLost) and seeing.all(RouterLost))
        assert all(each.silent_us > 2_000_000 for each in seeing.all(NodeDeclaredLost))
        assert [each.incarnation for each in seeing.all(NodeDeclaredLost)] == [1]
        assert [each.source for each in seeing.all(RouterLost)] == [router]


async def test_a_refusal_is_counted_and_asked_again(nats_server: EmbeddedNats, controllers: list[Replica]) -> None:
    async with witness(nats_server) as seeing:
        agent = Agent(seeing, refuse="busy")
        await agent.start()
        controllers[0].start()
        await eventually(lambda: len(agent.commands) >= 2)
        assert not seeing.all(EpochCommitted)
        agent.refuse = None
        await eventually(lambda: seeing.all(EpochCommitted))
        metrics = (await asyncio.to_thread(httpx.get, f"{controllers[0].url}/metrics")).text
        assert 'vertumnus_epoch_refusals_total{node="n0",reason="busy"}' in metrics


async def test_what_operators_ask_for_is_an_event(
    nats_server: EmbeddedNats, controllers: list[Replica], tmp_path: Path
) -> None:
    key = tmp_path / "operator.key"
    key.write_text("secret\n")
    controller = Replica("controller", nats_server, tmp_path, "9", VERTUMNUS_OPERATOR_KEY_FILE=str(key))
    try:
        async with (
            witness(nats_server) as seeing,
            httpx.AsyncClient(headers={"Authorization": "Bearer secret"}) as http,
        ):
            await seeing.tell(registered("n0", ranks=4), sender="n0")
            controller.start()
            await eventually(controller.ready)
            base = f"{controller.url}/v1/operator"

            assert (await http.post(f"{base}/freeze", json={"asked_by": "me"})).json() == {"events": ["frozen"]}
            await eventually(lambda: seeing.all(Frozen))
            assert (await http.post(f"{base}/freeze", json={"asked_by": "me"})).json() == {"events": []}
            ask = {"asked_by": "me", "reason": "fan", "node": "n0"}
            assert (await http.post(f"{base}/cordon", json=ask)).status_code == 200
            assert (await http.post(f"{base}/uncordon", json=ask)).json() == {"events": ["uncordoned"]}
            ask = {"asked_by": "me", "changes": {"window_s": 1, "long_tokens": 100}}
            assert (await http.post(f"{base}/parameters", json=ask)).status_code == 200
            await eventually(lambda: seeing.all(ParametersChanged))
            assert [each.asked_by for each in seeing.all(Cordoned)] == ["me"]

            refused = [
                ("cordon", {"asked_by": "me", "node": "nx"}, 404, "node: 'nx' is not one of ['n0']"),
                ("cordon", {"asked_by": "me"}, 422, "node: Field required"),
                ("thaw", {"asked_by": ""}, 422, "asked_by: String should have at least 1 character"),
                (
                    "parameters",
                    {"asked_by": "me", "changes": {"beta": 0}},
                    422,
                    "changes.beta: Input should be greater",
                ),
                ("parameters", {"asked_by": "me", "changes": {"frozen": True}}, 422, "cannot be set"),
                ("thaw", {"asked_by": "x" * 70_000}, 413, "body: at most 65536 bytes"),
            ]
            for path, body, status, says in refused:
                answer = await http.post(f"{base}/{path}", json=body)
                assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
            unsigned = await http.post(f"{base}/thaw", json={"asked_by": "me"}, headers={"Authorization": "Bearer no"})
            assert unsigned.status_code == 401
            await eventually(lambda: "8 ranks, but node n0 has 4" in controller.log.read_text())

            await seeing.tell(received("a", 150), assigned("a", "n0/1/0", 150, service_us=7), sender="router-1")
            await eventually(lambda: any(each.requests for each in seeing.all(WindowClosed)))
            pairs = list(rederive_windows(seeing.events))
            assert pairs
            assert all(recorded == derived for recorded, derived in pairs)
    finally:
        controller.stop(kill=True)


async def test_a_standby_sends_operators_to_the_leader(nats_server: EmbeddedNats, controllers: list[Replica]) -> None:
    first, second = controllers
    async with witness(nats_server) as seeing:
        first.start()
        await eventually(lambda: seeing.all(LeadershipTaken))
        second.start()
        await eventually(second.ready)
        answer = await asyncio.to_thread(httpx.post, f"{second.url}/v1/operator/freeze", json={"asked_by": "me"})
        assert answer.status_code == 503
        assert "the last leader was controller-1-" in answer.json()["detail"]


async def test_a_modelled_worker_serves_the_configured_composition(
    nats_server: EmbeddedNats, controllers: list[Replica], tmp_path: Path
) -> None:
    worker = Replica("worker", nats_server, tmp_path, VERTUMNUS_ENGINE="modelled")
    async with witness(nats_server) as seeing:
        try:
            worker.start()
            controllers[0].start()
            await eventually(lambda: seeing.all(EpochCommitted))
            await eventually(worker.ready)
            state = decider.initial()
            for each in seeing.events:
                decider.evolve(state, each)
            assert state.pool.nodes[N0].composition == (1, 1, 2, 4)
            assert all(map(state.pool.schedulable, state.pool.workers.values()))

            worker.stop(kill=True)
            await eventually(lambda: seeing.all(NodeDeclaredLost))
            worker.start()
            await eventually(lambda: len(seeing.all(NodeRegistered)) == 2)
            await eventually(worker.ready)
            assert seeing.all(NodeRegistered)[1].incarnation == 2
            assert len(seeing.all(EpochCommitted)) == 1, "it booted what was committed"
        finally:
            worker.stop(kill=True)
