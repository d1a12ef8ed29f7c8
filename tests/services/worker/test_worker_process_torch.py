"""The worker as a process with real rank processes, on a real NATS server."""

import os
import signal
from pathlib import Path

from cli.embedded.nats import EmbeddedNats
from shared.contracts.commands import Adopt, Assign, SamplingSpec
from shared.contracts.events import BlocksStored, KvHandedOff, NodeLost, RankAdoptedEpoch
from shared.contracts.ids import NodeId, RequestId, decode_worker_id, worker_id
from shared.model.blocks import block_chain
from tests.services.worker.processes import Others, WorkerProcess, others, until
from tests.services.worker.scripted import prompt
from tests.support.tiny_models import write_tiny_model

NODE = NodeId("n0")


def assignment(pool: Others, request: str, epoch: int = 1) -> Assign:
    tokens = pool.prompts[RequestId(request)] = prompt(100) % 200
    return Assign(
        request=RequestId(request),
        attempt=1,
        router=pool.router,
        router_source=pool.runtime.source,
        worker=worker_id(NODE, epoch, 0),
        decode_worker=decode_worker_id(NODE, 0),
        prompt_tokens=100,
        block_ids=b"".join(block_chain(tokens, 16, b"k")),
        max_new_tokens=5,
        sampling=SamplingSpec(temperature=0.0),
        service_us=100_000,
    )


async def tokens_of(pool: Others, assign: Assign) -> list[int]:
    assert (await pool.ask(NODE, assign)).kind == "accepted"
    await until(
        lambda: any(frame.request == assign.request and frame.finish for frame in pool.frames),
        f"{assign.request} is served",
    )
    return [token for frame in pool.frames if frame.request == assign.request for token in frame.tokens]


def descendants(pid: int) -> list[int]:
    """Children of any of its threads, and their children, each after its parent."""
    lists = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/children")]
    children = sorted(int(child) for each in lists for child in each.split())
    return [found for child in children for found in (child, *descendants(child))]


async def test_a_killed_or_hung_rank_costs_an_incarnation_and_not_the_agent(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    settings = {
        "VERTUMNUS_ENGINE": "torch",
        "VERTUMNUS_MODEL_DIR": str(write_tiny_model(tmp_path / "tiny", "llama")),
        "VERTUMNUS_PREFILL_RANKS": "2",
        "VERTUMNUS_BLOCK_TOKENS": "16",
        "VERTUMNUS_BLOCKS_PER_RANK": "32",
    }
    worker = WorkerProcess(nats_server.url, tmp_path / "worker.log", settings)
    try:
        async with others(nats_server.url) as pool:
            assert (await pool.registered(NODE, 1)).engine == "torch"
            await pool.commit(NODE, 1, 1, (2,))
            tokens = await tokens_of(pool, assignment(pool, "a"))
            assert len(tokens) == 5
            await until(lambda: len(pool.events(KvHandedOff, BlocksStored)) == 2, "its facts are stored")

            zygote, *ranks = descendants(worker.process.pid)
            assert len(ranks) == 4, f"{ranks} are two prefill ranks, a decode rank and the mover of zygote {zygote}"
            os.kill(ranks[0], signal.SIGKILL)
            again = await pool.registered(NODE, 2)
            assert (again.epoch, again.composition) == (1, (2,))
            assert len(pool.events(NodeLost)) == 1
            assert await tokens_of(pool, assignment(pool, "b")) == tokens

            os.kill(descendants(worker.process.pid)[1], signal.SIGSTOP)
            refusal = await pool.ask(NODE, Adopt(term=1, node=NODE, incarnation=2, epoch=2, composition=(1, 1)))
            assert refusal.kind == "refused"
            await pool.registered(NODE, 3)
            lost = [each.reason for each in pool.events(NodeLost) if isinstance(each, NodeLost)]
            assert "hangs: stopped" in lost[-1], "it went back, and gave the rank up when it stayed away"
            assert {each.epoch for each in pool.events(RankAdoptedEpoch) if isinstance(each, RankAdoptedEpoch)} == {1}
            await pool.commit(NODE, 3, 2, (1, 1))
            assert await tokens_of(pool, assignment(pool, "c", epoch=2)) == tokens
            assert worker.process.poll() is None, "the agent is the same process"
            assert worker.end() == 0
            await until(lambda: len(pool.events(NodeLost)) == 3, "it says that it is gone")
    finally:
        worker.process.kill()
        worker.process.wait()
