"""The whole system in one process: one request, one copy of its prefix, one reconfiguration.

    python examples/one_request.py

Four services, each a pure decider: a state, a fold (`evolve`), and functions from the state to events. What they decide
goes to one log and everybody folds all of it, so they agree. Real services run this very code over NATS; their shells do
what is done by hand here: pass commands on, run the engine, watch the clock. Read `main` beside what it prints.
"""

import asyncio

import numpy as np

from services.cachemgr import decider as cachemgr
from services.cachemgr import replication
from services.controller import decider as controller
from services.controller import epochs, saga
from services.controller.capacity import Capacity
from services.router import decider as router
from services.worker import decider as agent
from services.worker import geometry
from services.worker.engine import protocol as engine
from shared.contracts.commands import Adopt, Assign, SamplingSpec
from shared.contracts.events import BlockRun, BlocksStored, RequestCompleted, RouterRegistered
from shared.contracts.ids import NodeId, RequestId, RouterId, TenantId
from shared.model.blocks import block_chain, block_key
from shared.model.cost import load_coefficients
from simulation.world import World

N0, R1, REQUEST = NodeId("n0"), RouterId("r1"), RequestId("req-1")
COST = load_coefficients("qwen3_30b_a3b_h20")
ENGINE = engine.EngineDescription(
    engine="modelled", model="Qwen3-30B-A3B", model_revision="1", tokenizer_revision="1", dtype="bfloat16",
    kv_layout="cyclic", block_tokens=64, prefill_ranks=4, decode_ranks=0, degrees=(1, 2, 4), blocks_per_rank=4_096,
    prompt_tokens_max=8_192, kv_bytes_per_token=98_304,
)  # fmt: skip
PROMPT = np.arange(1_000, dtype=np.uint32)
capacity_of = {1: Capacity(14_000_000), 2: Capacity(14_000_000)}.__getitem__
CHAIN = tuple(block_chain(PROMPT, ENGINE.block_tokens, block_key(b"deployment", "tenant group")))

LINES = {
    "leadership-taken": "term {term}",
    "cache-leadership-taken": "term {term}",
    "node-registered": "{node}: {prefill_ranks} ranks, engine {engine}",
    "rank-adopted-epoch": "rank {rank} serves epoch {epoch}",
    "epoch-committed": "{node} is {composition} in epoch {epoch}",
    "router-registered": "{router}",
    "request-received": "{request}: {prompt_tokens} tokens",
    "request-assigned": "{request} to {worker}, degree {degree}: {service_us} µs predicted",
    "prefill-started": "{request} at {worker}",
    "prefill-completed": "{request} at {worker}: {computed_tokens} tokens computed in {prefill_us} µs",
    "blocks-stored": "{blocks} blocks at {worker}, by {cause}",
    "request-completed": "{request}: first token after {ttft_us} µs",
    "replication-requested": "{blocks} blocks from {sources[0]} to {destination}, degree {degree}",
    "replica-installed": "{blocks} blocks at {destination} after {copy_us} µs",
    "reconfiguration-planned": "{node}: {old_composition} to {new_composition}, because of {reason}",
    "drain-started": "{workers} get nothing new",
    "drain-completed": "{workers} are idle after {drain_us} µs",
    "placement-reconciled": "what the workers of epoch {epoch} start with",
    "window-closed": "window {k}: {requests} request, {demand_us} µs of demand for {capacity_us} µs of capacity",
    "cache-scan-completed": "scan {scan}: {holders} copies of {nodes} blocks, {inter_candidates} wanted elsewhere",
}


async def main() -> None:
    world, at_agent = World(), agent.initial(N0, queue_max=8)
    at_router, at_controller, at_cachemgr = router.initial(COST), controller.initial(), cachemgr.initial(COST)
    await world.show(LINES)
    route = await world.join("router", at_router, router.evolve)
    work = await world.join("n0", at_agent, agent.evolve)
    control = await world.join("controller", at_controller, controller.evolve, leads=world.subjects.control)
    manage = await world.join("cachemgr", at_cachemgr, cachemgr.evolve, leads=world.subjects.cache_control)

    async def adopt(order: Adopt) -> None:
        """The agent's ranks switch to another geometry, which takes them 2 ms."""
        assert geometry.refuse_adopt(at_agent, order, ENGINE.prefill_ranks) is None
        await world.clock.advance(0.002)
        agent.serve(at_agent, agent.Geometry(order.epoch, order.composition), {})
        await work(geometry.adopted(at_agent, tuple(engine.RankAdopted(rank, 0.002) for rank in range(4))))

    print("A node joins and gets its first epoch: two workers of one rank, one of two.")
    await control([controller.take_leadership(at_controller, "controller", 1)])
    await manage([cachemgr.take_leadership(at_cachemgr, "cachemgr", 1)])
    await work(agent.register(at_agent, ENGINE, COST.version))
    [wanted] = epochs.wanted(at_controller, epochs.Configured((1, 1, 2), {}), refused={})
    await adopt(wanted.adopt(at_controller.term))
    await control(epochs.commit(at_controller, wanted, capacity_of))

    print("\nA request goes where it costs least, is prefilled there and answered.")
    await route([RouterRegistered(router=R1)])
    arrival = router.Arrival(REQUEST, TenantId("acme"), "qwen3", len(PROMPT), 1, COST.slo_us(len(PROMPT)), False, CHAIN)
    decided = router.receive(at_router, arrival, router.Moment(world.clock.now_ns(), at_controller.seen_seq))
    await route(decided)
    assigned, us = decided[1], decided[1].service_us
    order = Assign(
        request=REQUEST, attempt=1, router=R1, router_source="router", worker=assigned.worker, max_new_tokens=1,
        prompt_tokens=len(PROMPT), block_ids=b"".join(CHAIN), sampling=SamplingSpec(), service_us=us,
    )  # fmt: skip
    assert at_agent.desk.refusal(order) is None
    job = at_agent.desk.accept(order, world.clock.monotonic_ns())
    await work(agent.start(job, queue_us=0))
    await world.clock.advance(us / 1e6)
    share = engine.ItemResult(REQUEST, 0, len(PROMPT), engine.Token(7), engine.Stored(0, len(CHAIN)))
    await work(agent.complete(at_agent, job, agent.Prefilled(share, (), 0, us, us, len(PROMPT), 0, steps=1)))
    answer = RequestCompleted(
        request=REQUEST, worker=assigned.worker, ttft_us=us, queue_us=0, prefill_us=us,
        handoff_us=0, tpot_us=0, output_tokens=1, cached_tokens=0, finish="stop",
    )  # fmt: skip
    await route(router.end(at_router, answer))
    at_agent.desk.end(job)

    print("\nIts prefix is copied to a worker of another degree, and counts there once that worker has reported it.")
    small, pool = at_cachemgr.pool.nodes[N0].workers[0].id, at_cachemgr.pool
    wish = replication.Wish("copy-1", CHAIN[-1], 1, "inter", (assigned.worker,), small, score=0.4)
    await manage(replication.request(at_cachemgr.operations, at_cachemgr.trie, at_cachemgr.holders, pool, wish))
    copy = replication.order(at_cachemgr.operations.open["copy-1"], at_cachemgr.trie, at_cachemgr.term)
    await world.clock.advance(0.005)
    run = BlockRun(parent=copy.parent, block_ids=copy.block_ids)
    arrived = BlocksStored(worker=small, incarnation=1, number=1, cause="replication", blocks=len(CHAIN), runs=(run,))
    await work([arrived])
    await manage(replication.settle(at_cachemgr.operations.open["copy-1"], pool, world.clock.now_ns()))

    print("\nThe larger worker is split in two, in four steps that each leave a way back.")
    move = saga.Move(N0, (1, 1, 1, 1), "paper", "demand")
    await control(saga.plan(at_controller.sagas, at_controller.pool, at_controller.parameters, move))
    split, now_ns = at_controller.sagas.open[N0], world.clock.now_ns

    async def advance() -> None:
        await control(saga.advance(split, at_controller.parameters, capacity_of, now_ns()))

    await advance()
    drain = saga.orders(split, at_controller.parameters, at_controller.term)
    assert geometry.refuse_drain(at_agent, drain) is None
    at_agent.desk.drain(drain.workers)
    await work(geometry.drained(at_agent, drain.workers, returned_requests=0, drain_us=0))
    await adopt(saga.orders(split, at_controller.parameters, at_controller.term))
    await manage(cachemgr.reconcile_placements(at_cachemgr))
    await advance()

    print("\nWhat everybody knows now.")
    await manage(cachemgr.scan(at_cachemgr))
    await world.clock.advance(20)
    await control(controller.close_window(at_controller, world.clock.now_ns()))
    for each in at_router.pool.nodes[N0].workers:
        print(f"    {each.id} holds {at_router.holders.matched(CHAIN).get(each.id, 0)} blocks of the prompt")


if __name__ == "__main__":
    asyncio.run(main())
