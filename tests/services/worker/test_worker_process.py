"""The worker as a process, with the modelled engine, on a real NATS server."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from cli.embedded.nats import EmbeddedNats
from services.worker.settings import WorkerSettings
from shared.contracts.commands import Assign, SamplingSpec
from shared.contracts.events import BlocksStored, NodeLost, PrefillCompleted, PrefillStarted, RankAdoptedEpoch
from shared.contracts.ids import NodeId, RequestId, decode_worker_id, worker_id
from shared.model.blocks import block_chain
from tests.services.worker.processes import Others, WorkerProcess, others, until
from tests.services.worker.scripted import prompt

NODE = NodeId("m0")
Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(nats_server: EmbeddedNats, tmp_path: Path) -> Iterator[Start]:
    """Starts worker processes on the test's server, and ends those that still run."""
    started: list[WorkerProcess] = []

    def start(**env: str) -> WorkerProcess:
        names = {
            f"VERTUMNUS_{name.upper()}": value for name, value in {"node_prefix": "m", "speedup": "10", **env}.items()
        }
        started.append(WorkerProcess(nats_server.url, tmp_path / "worker.log", names))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


def assignment(pool: Others, request: str, length: int, epoch: int = 1, **changes: object) -> Assign:
    tokens = pool.prompts[RequestId(request)] = prompt(length)
    assign = Assign(
        request=RequestId(request),
        attempt=1,
        router=pool.router,
        router_source=pool.runtime.source,
        worker=worker_id(NODE, epoch, 0),
        decode_worker=decode_worker_id(NODE, 0),
        prompt_tokens=length,
        block_ids=b"".join(block_chain(tokens, 64, b"k")),
        max_new_tokens=4,
        sampling=SamplingSpec(temperature=0.0),
        service_us=100_000,
    )
    return assign.model_copy(update=changes)


async def served(pool: Others, assign: Assign) -> list[int]:
    """The request's tokens, once its last frame is here."""
    assert (await pool.ask(NODE, assign)).kind == "accepted"

    def frames() -> list[int]:
        mine = [frame for frame in pool.frames if frame.request == assign.request]
        return [token for frame in mine for token in frame.tokens] if mine and mine[-1].finish else []

    await until(lambda: bool(frames()), f"{assign.request} is served")
    return frames()


async def test_a_killed_agent_comes_back_as_the_next_incarnation_with_its_composition(
    nats_server: EmbeddedNats, start: Start
) -> None:
    worker = start()
    async with others(nats_server.url) as pool:
        first = await pool.registered(NODE, 1)
        assert (first.engine, first.epoch, first.composition) == ("modelled", 0, ())
        await pool.commit(NODE, 1, 1, (4, 4))
        assert len(pool.events(RankAdoptedEpoch)) == 8
        tokens = await served(pool, assignment(pool, "a", 8_000))
        assert len(tokens) == 4

        def stored() -> list[tuple[int, int]]:
            """Of those that are served: the lost one may have had chunks."""
            served = [each for each in pool.events(BlocksStored) if each.request != "lost"]
            return [(each.incarnation, each.number) for each in served]

        await until(lambda: len(stored()) == 1, "the prefill's facts")

        assert (await pool.ask(NODE, assignment(pool, "lost", 100_000))).kind == "accepted"
        await until(lambda: len(pool.events(PrefillStarted)) == 2, "the second prefill starts")
        worker.kill()
        again = start()
        second = await pool.registered(NODE, 2)
        assert (second.epoch, second.composition) == (1, (4, 4))
        assert pool.events(NodeLost) == [NodeLost(node=NODE, incarnation=1, reason="the agent was restarted")]
        assert await served(pool, assignment(pool, "b", 8_000)) == tokens, "another life generates the same"
        await until(lambda: len(stored()) == 2, "its facts are stored")
        assert pool.events(PrefillCompleted)[-1].cached_own_tokens == 0
        assert stored() == [(1, 1), (2, 1)]

        assert again.end() == 0
        await until(lambda: len(pool.events(NodeLost)) == 2, "it says that it is gone")
        assert pool.events(NodeLost)[-1] == NodeLost(node=NODE, incarnation=2, reason="shutdown")


async def test_one_process_stands_for_many_nodes(nats_server: EmbeddedNats, start: Start) -> None:
    worker = start(nodes="3", prefill_ranks="4")
    async with others(nats_server.url) as pool:
        for index in range(3):
            node = NodeId(f"m{index}")
            assert (await pool.registered(node, 1)).prefill_ranks == 4
            await pool.commit(node, 1, 1, (4,))
        sources = {each.event.source for each in pool.stored if each.event.type == "node-registered"}
        assert len(sources) == 3, "each node numbers its own events"
        assert (await worker.get("/readyz")).status_code == 200
        metrics = (await worker.get("/metrics")).text
        assert 'vertumnus_worker_incarnations_total{node="m2"} 1.0' in metrics
        assert worker.end() == 0
        await until(lambda: len(pool.events(NodeLost)) == 3, "every node says that it is gone")


async def test_a_process_whose_node_is_taken_over_ends(nats_server: EmbeddedNats, start: Start) -> None:
    first = start()
    async with others(nats_server.url) as pool:
        await pool.registered(NODE, 1)
        start()
        await pool.registered(NODE, 2)
        await until(lambda: first.process.poll() is not None, "the first process ends")
        assert first.process.returncode == 1
        assert "has registered node m0" in first.log.read_text()


async def test_it_serves_on_when_nats_comes_back(nats_server: EmbeddedNats, start: Start) -> None:
    worker = start()
    async with others(nats_server.url) as pool:
        await pool.registered(NODE, 1)
        await pool.commit(NODE, 1, 1, (8,))
        nats_server.stop(kill=True)
        nats_server.start()
        await until(lambda: worker.process.poll() is None, "it lives")
        assert len(await served(pool, assignment(pool, "a", 5_000))) == 4
        await until(lambda: len(pool.events(BlocksStored)) == 1, "its facts are stored")
        assert pool.events(BlocksStored)[0].incarnation == 1


def test_bad_settings_end_the_process_with_their_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.worker"],
        env={**os.environ, "VERTUMNUS_ENGINE": "magic"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr == "VERTUMNUS_ENGINE: Input should be 'torch', 'sglang' or 'modelled'\n"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engine": "modelled", "coefficients": "nosuch"}, "coefficients: 'nosuch' is not one of"),
        ({"engine": "torch"}, "model_dir: the torch engine needs a model directory"),
        ({"engine": "modelled", "node": "a.b"}, "node: 'a.b' must be"),
        ({"engine": "torch", "model_dir": "/m", "nodes": 5}, "nodes: 5 need engine=modelled"),
        ({"engine": "modelled", "node": "a", "nodes": 5}, "nodes: 5 need engine=modelled and node_prefix instead"),
    ],
)
def test_settings_that_do_not_go_together_are_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        WorkerSettings.model_validate(values)


def test_a_modelled_worker_does_not_load_torch() -> None:
    code = "import sys, services.worker.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
