"""Two worker processes with real ranks, on a real NATS server: what one has computed the other reads, and goes on from. The
first has no decode rank, so what it prefills is decoded by the second. In one test a real cache manager says what is copied."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from cli.embedded.nats import EmbeddedNats
from shared.contracts.commands import Assign, SamplingSpec
from shared.contracts.copy_commands import Copied, Copy, Evict, Evicted
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlocksEvicted,
    BlocksStored,
    CacheLeadershipTaken,
    KvHandedOff,
    ParametersChanged,
    PrefillCompleted,
    PricedCandidate,
    ReclamationRequested,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
    ReplicationRequested,
    RequestAssigned,
)
from shared.contracts.ids import NodeId, RequestId, WorkerId, decode_worker_id, node_of, unpack_block_ids, worker_id
from shared.model.blocks import Tokens, block_chain
from shared.model.cost import Coefficients
from shared.model.lattice import Composition
from shared.runtime.service import Runtime
from tests.services.worker.processes import POOL, Others, WorkerProcess, others, until
from tests.services.worker.scripted import prompt
from tests.support.replica import Replica
from tests.support.story import assigned, received
from tests.support.tiny_models import write_tiny_model

TOKENS, OTHERS = prompt(100) % 200, prompt(100, seed=1) % 200
BLOCKS = block_chain(TOKENS, 16, b"k")
PREFILLING, DECODING = NodeId("n0"), NodeId("n1")
SLOW = Coefficients(version="slow", d=0, a=0, b=0, c=1, alpha=0)
"""A fetch may take as long as it saves: whoever runs this slowly waits for it."""


def assignment(
    pool: Others,
    runtime: Runtime,
    request: str,
    worker: WorkerId,
    tokens: Tokens = TOKENS,
    fetch_from: WorkerId | None = None,
    new_tokens: int = 5,
) -> Assign:
    pool.prompts[RequestId(request)] = tokens
    blocks = block_chain(tokens, 16, b"k")
    return Assign(
        request=RequestId(request),
        attempt=1,
        router=pool.router,
        router_source=runtime.source,
        worker=worker,
        decode_worker=decode_worker_id(DECODING, 0),
        prompt_tokens=len(tokens),
        block_ids=b"".join(blocks),
        fetch_from=fetch_from,
        fetch_blocks=len(blocks) if fetch_from else 0,
        max_new_tokens=new_tokens,
        sampling=SamplingSpec(temperature=0.0),
        service_us=100_000,
    )


async def tokens_of(pool: Others, assign: Assign) -> list[int]:
    assert (await pool.ask(node_of(assign.worker), assign)).kind == "accepted"
    await until(
        lambda: any(frame.request == assign.request and frame.finish for frame in pool.frames), "the request is served"
    )
    return [token for frame in pool.frames if frame.request == assign.request for token in frame.tokens]


@asynccontextmanager
async def two_nodes(
    nats_server: EmbeddedNats, folder: Path, prefilling: Composition = (1,), decoding: Composition = (2,)
) -> AsyncIterator[tuple[Others, dict[NodeId, WorkerProcess], Path]]:
    """Both serve, each its composition."""
    model = write_tiny_model(folder / "tiny", "llama")
    coefficients = folder / "slow.json"
    coefficients.write_text(SLOW.model_dump_json())
    compositions = {PREFILLING: prefilling, DECODING: decoding}
    processes = {}
    for node, composition in compositions.items():
        settings = {
            "VERTUMNUS_ENGINE": "torch",
            "VERTUMNUS_MODEL_DIR": str(model),
            "VERTUMNUS_NODE": node,
            "VERTUMNUS_PREFILL_RANKS": str(sum(composition)),
            "VERTUMNUS_DECODE_RANKS": "0" if node == PREFILLING else "1",
            "VERTUMNUS_BLOCK_TOKENS": "16",
            "VERTUMNUS_BLOCKS_PER_RANK": "32",
            "VERTUMNUS_CONTEXT_TOKENS_MAX": "256",
            "VERTUMNUS_COPY_CHECKSUMS": "true",
            "VERTUMNUS_COEFFICIENTS": str(coefficients),
        }
        processes[node] = WorkerProcess(nats_server.url, folder / f"{node}.log", settings)
    try:
        async with others(nats_server.url) as pool:
            for node, composition in compositions.items():
                await pool.registered(node, 1)
                await pool.commit(node, 1, 1, composition)
            yield pool, processes, model
    finally:
        for process in processes.values():
            process.kill()


def check_greedy(model_dir: Path, said: list[int]) -> None:
    """What transformers says, wherever it is decided."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([*TOKENS.tolist(), *said[:-1]])[None]).logits[0, len(TOKENS) - 1 :]
    best_T2 = logits_TV.topk(2).values
    decided_T = best_T2[:, 0] - best_T2[:, 1] > 1e-3
    assert int(decided_T.sum()) > len(said) // 2
    assert torch.equal(logits_TV.argmax(-1)[decided_T], torch.tensor(said)[decided_T])


async def test_a_prefix_is_copied_or_fetched_to_another_node_and_degree_used_there_and_evicted(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    there, here = worker_id(PREFILLING, 1, 0), worker_id(DECODING, 1, 0)
    async with two_nodes(nats_server, tmp_path) as (pool, _, model):
        computed = await tokens_of(pool, assignment(pool, pool.runtime, "computed", there))
        check_greedy(model, computed)
        (handed_off,) = await on_the_log(pool, KvHandedOff)
        assert isinstance(handed_off, KvHandedOff)
        assert (handed_off.worker, handed_off.decode_worker) == (there, decode_worker_id(DECODING, 0))
        assert handed_off.bytes > 0
        order = Copy(
            term=1,
            operation="op",
            source=there,
            destination=here,
            block_ids=b"".join(BLOCKS),
            deadline_us=25_000_000,
        )
        copied = await pool.ask(DECODING, order)
        assert isinstance(copied, Copied), copied
        assert (copied.blocks, copied.failure) == (len(BLOCKS), None)
        assert await tokens_of(pool, assignment(pool, pool.runtime, "copied", here)) == computed
        await until(
            lambda: len(pool.events(PrefillCompleted)) == len(pool.events(BlocksStored)) == 2,
            "the log, which no token waits for, has it all",
        )
        (used,) = [
            each for each in pool.events(PrefillCompleted) if isinstance(each, PrefillCompleted) and each.worker == here
        ]
        assert used.cached_own_tokens == 16 * len(BLOCKS)
        stored = [each for each in pool.events(BlocksStored) if isinstance(each, BlocksStored)]
        assert {(each.worker, each.cause, each.blocks) for each in stored} == {
            (there, "prefill", len(BLOCKS)),
            (here, "replication", len(BLOCKS)),
        }
        evict = Evict(term=1, operation="out", worker=here, block_ids=b"".join(BLOCKS[2:]))
        evicted = await pool.ask(DECODING, evict)
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


def regretted(request: str, holder: WorkerId, lacking: WorkerId, degree: int) -> RequestAssigned:
    """The router took the holder, for a second; who lacks the prefix would have been free at once."""
    prices = ((holder, 4, 1_000_000, 1), (lacking, degree, 0, 2_000_000))
    candidates = tuple(
        PricedCandidate(
            worker=worker, degree=of, cached_tokens=0, queue_us=queue_us, service_us=service_us, occupancy_us=0,
            price_us=queue_us + service_us,
        )
        for worker, of, queue_us, service_us in prices
    )  # fmt: skip
    told = assigned(request, holder, len(TOKENS) - 16 * len(BLOCKS), 16 * len(BLOCKS), degree=4)
    return told.model_copy(update={"candidates": candidates})


async def test_a_hot_prefix_of_one_worker_comes_to_another_degree_and_to_a_second_worker_and_goes_when_it_is_cold(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """Held at degree 4 alone, then by demand at degree 1 and at the other worker of degree 4, then by nobody."""
    holder, second, small = worker_id(PREFILLING, 1, 0), worker_id(DECODING, 1, 0), worker_id(DECODING, 1, 4)
    manager = Replica("cachemgr", nats_server, tmp_path, VERTUMNUS_POOL=POOL)
    async with two_nodes(nats_server, tmp_path, (4,), (4, 1)) as (pool, _, model):
        try:
            manager.start()
            await on_the_log(pool, CacheLeadershipTaken)
            said = await tokens_of(pool, assignment(pool, pool.runtime, "first", holder))
            check_greedy(model, said)
            await pool.tell(changed(1, cache_policy="regret", scan_every_s=0.1))
            for number in range(2_000):  # every scan forgets a part of what was asked before
                for lacking, degree in ((small, 1), (second, 4)):
                    request = f"asks-{number}-{degree}"
                    asked = received(request, len(TOKENS), block_ids=b"".join(BLOCKS))
                    await pool.tell(asked, regretted(request, holder, lacking, degree))
                if len(pool.events(ReplicaInstalled)) == 2:
                    break
                await asyncio.sleep(0.02)
            assert len(pool.events(ReplicaInstalled)) == 2, pool.events(ReplicationFailed)
            copies = {each.kind: each for each in pool.events(ReplicationRequested)}
            assert (copies["inter"].degree, copies["inter"].destination) == (1, small)
            assert (copies["intra"].degree, copies["intra"].destination) == (4, second)
            assert copies["intra"].sources == (holder,)
            for request, worker in (("at-one", small), ("at-four", second)):
                assert await tokens_of(pool, assignment(pool, pool.runtime, request, worker)) == said
            await until(lambda: len(pool.events(PrefillCompleted)) == 3, "the log has it all")
            assert [each.cached_own_tokens for each in pool.events(PrefillCompleted)] == [0, *[16 * len(BLOCKS)] * 2]

            await pool.tell(changed(2, cache_policy="paper", decay=0.2))
            # What was missed often may be copied once more before that is forgotten, so a worker may give up its replica twice.
            everywhere = {holder, second, small}
            await until(
                lambda: {each.worker for each in pool.events(ReplicaReclaimed)} == everywhere,
                "nobody asks, and all of it goes",
            )
            assert {each.worker for each in pool.events(ReclamationRequested)} == everywhere
            gone = [each for each in pool.events(BlocksEvicted) if each.cause == "reclaim"]
            assert {(each.worker, block) for each in gone for block in unpack_block_ids(each.block_ids)} == {
                (worker, block) for worker in everywhere for block in BLOCKS
            }
            await pool.tell(changed(3, cache_policy="lru"))
            assert await tokens_of(pool, assignment(pool, pool.runtime, "again", small)) == said
        finally:
            manager.stop(kill=True)


def changed(version: int, **changes: object) -> ParametersChanged:
    return ParametersChanged(parameters_version=version, changes=changes, asked_by="ann")


async def on_the_log(pool: Others, kind: type[EventData]) -> list[EventData]:
    await until(lambda: bool(pool.events(kind)), f"{kind.TYPE} is on the log")
    return pool.events(kind)


async def test_a_stream_whose_decode_node_is_killed_breaks_off_and_is_answered_again_elsewhere(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """The router is told by the node that prefilled, whose job it is, and asks again with what it has got: the decode node has
    come back meanwhile, and the whole answer is that of transformers."""
    there = worker_id(PREFILLING, 1, 0)
    async with two_nodes(nats_server, tmp_path) as (pool, processes, model):
        assign = assignment(pool, pool.runtime, "long", there, new_tokens=150)
        assert (await pool.ask(PREFILLING, assign)).kind == "accepted"
        await until(lambda: len(pool.frames) > 1, "the other node decodes")
        processes[DECODING].kill()
        await until(lambda: any(frame.error for frame in pool.frames), "the router is told")
        said = [token for frame in pool.frames for token in frame.tokens]
        assert [frame.error for frame in pool.frames if frame.error] == ["engine"]
        assert not any(frame.finish for frame in pool.frames)
        check_greedy(model, said)
        pool.frames.clear()
        processes[DECODING] = processes[DECODING].again()
        await pool.registered(DECODING, 2)
        onwards = np.concatenate([TOKENS, np.array(said, dtype=np.uint32)])
        again = assignment(pool, pool.runtime, "long", there, onwards, new_tokens=20)
        rest = await tokens_of(pool, again.model_copy(update={"attempt": 2}))
        check_greedy(model, said + rest)
