"""Two worker processes with real ranks, on a real NATS server: what one has computed the other reads, and goes on from."""

from pathlib import Path

from cli.embedded.nats import EmbeddedNats
from shared.contracts.commands import Assign, SamplingSpec
from shared.contracts.copy_commands import Copied, Copy, Evict, Evicted
from shared.contracts.events import BlocksEvicted, BlocksStored, PrefillCompleted
from shared.contracts.ids import NodeId, RequestId, WorkerId, decode_worker_id, node_of, worker_id
from shared.model.blocks import Tokens, block_chain
from shared.model.cost import Coefficients
from shared.runtime.service import Runtime
from tests.services.worker.processes import Others, WorkerProcess, others, until
from tests.services.worker.scripted import prompt
from tests.support.tiny_models import write_tiny_model

TOKENS, OTHERS = prompt(100) % 200, prompt(100, seed=1) % 200
BLOCKS = block_chain(TOKENS, 16, b"k")
SLOW = Coefficients(version="slow", d=0, a=0, b=0, c=1, alpha=0)
"""A fetch may take as long as it saves: whoever runs this slowly waits for it."""


def assignment(
    pool: Others,
    runtime: Runtime,
    request: str,
    worker: WorkerId,
    tokens: Tokens = TOKENS,
    fetch_from: WorkerId | None = None,
) -> Assign:
    pool.prompts[RequestId(request)] = tokens
    blocks = block_chain(tokens, 16, b"k")
    return Assign(
        request=RequestId(request),
        attempt=1,
        router=pool.router,
        router_source=runtime.source,
        worker=worker,
        decode_worker=decode_worker_id(node_of(worker), 0),
        prompt_tokens=len(tokens),
        block_ids=b"".join(blocks),
        fetch_from=fetch_from,
        fetch_blocks=len(blocks) if fetch_from else 0,
        max_new_tokens=5,
        sampling=SamplingSpec(temperature=0.0),
        service_us=100_000,
    )


async def tokens_of(pool: Others, assign: Assign) -> list[int]:
    assert (await pool.ask(node_of(assign.worker), assign)).kind == "accepted"
    await until(
        lambda: any(frame.request == assign.request and frame.finish for frame in pool.frames), "the request is served"
    )
    return [token for frame in pool.frames if frame.request == assign.request for token in frame.tokens]


async def test_a_prefix_is_copied_or_fetched_to_another_node_and_degree_used_there_and_evicted(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny", "llama"))
    coefficients = tmp_path / "slow.json"
    coefficients.write_text(SLOW.model_dump_json())
    compositions = {NodeId("n0"): (1,), NodeId("n1"): (2,)}
    processes = []
    for node, composition in compositions.items():
        settings = {
            "VERTUMNUS_ENGINE": "torch",
            "VERTUMNUS_MODEL_DIR": model,
            "VERTUMNUS_NODE": node,
            "VERTUMNUS_PREFILL_RANKS": str(sum(composition)),
            "VERTUMNUS_BLOCK_TOKENS": "16",
            "VERTUMNUS_BLOCKS_PER_RANK": "32",
            "VERTUMNUS_CONTEXT_TOKENS_MAX": "256",
            "VERTUMNUS_COPY_CHECKSUMS": "true",
            "VERTUMNUS_COEFFICIENTS": str(coefficients),
        }
        processes.append(WorkerProcess(nats_server.url, tmp_path / f"{node}.log", settings))
    there, here = worker_id(NodeId("n0"), 1, 0), worker_id(NodeId("n1"), 1, 0)
    try:
        async with others(nats_server.url) as pool:
            for node, composition in compositions.items():
                await pool.registered(node, 1)
                await pool.commit(node, 1, 1, composition)
            computed = await tokens_of(pool, assignment(pool, pool.runtime, "computed", there))
            order = Copy(
                term=1,
                operation="op",
                source=there,
                destination=here,
                block_ids=b"".join(BLOCKS),
                deadline_us=25_000_000,
            )
            copied = await pool.ask(NodeId("n1"), order)
            assert isinstance(copied, Copied), copied
            assert (copied.blocks, copied.failure) == (len(BLOCKS), None)
            assert await tokens_of(pool, assignment(pool, pool.runtime, "copied", here)) == computed
            await until(
                lambda: len(pool.events(PrefillCompleted)) == len(pool.events(BlocksStored)) == 2,
                "the log, which no token waits for, has it all",
            )
            (used,) = [
                each
                for each in pool.events(PrefillCompleted)
                if isinstance(each, PrefillCompleted) and each.worker == here
            ]
            assert used.cached_own_tokens == 16 * len(BLOCKS)
            stored = [each for each in pool.events(BlocksStored) if isinstance(each, BlocksStored)]
            assert {(each.worker, each.cause, each.blocks) for each in stored} == {
                (there, "prefill", len(BLOCKS)),
                (here, "replication", len(BLOCKS)),
            }
            evict = Evict(term=1, operation="out", worker=here, block_ids=b"".join(BLOCKS[2:]))
            evicted = await pool.ask(NodeId("n1"), evict)
            assert evicted == Evicted(block_ids=b"".join(reversed(BLOCKS[2:])))
            await until(lambda: bool(pool.events(BlocksEvicted)), "the eviction is on the log")
            computed = await tokens_of(pool, assignment(pool, pool.runtime, "others", there, OTHERS))
            fetch = assignment(pool, pool.runtime, "fetched", here, OTHERS, fetch_from=there)
            assert await tokens_of(pool, fetch) == computed
            await until(lambda: len(pool.events(PrefillCompleted)) == 4, "the log has it all")
            done = pool.events(PrefillCompleted)[-1]
            assert isinstance(done, PrefillCompleted)
            assert (done.request, done.fetch_fallback, done.cached_own_tokens) == ("fetched", None, 0)
            assert (done.cached_fetched_tokens, done.computed_tokens) == (16 * len(BLOCKS), 100 - 16 * len(BLOCKS))
    finally:
        for process in processes:
            process.kill()
