"""Four units: every composition, mixed ones too, inside one server, under traffic and faults."""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
import zmq

from services.worker.engine.sglang.plugin.paths import NOWHERE, block_hash, path_of
from services.worker.engine.sglang.verbs import Limits, Unreachable, Verbs, switch
from shared.model.lattice import Composition, Group
from shared.runtime.clock import SystemClock
from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.chain import NEW_TOKENS, PATIENT, check_everywhere, check_groups, expected, prepared, switched, travel
from tests.sglang.conftest import Kept
from tests.sglang.kv_listener import Listener
from tests.sglang.traffic import mixed_prompts, random_prompt
from tests.support.adapter_servers import PAGE_TOKENS, Running, log_of
from tests.support.switching_servers import client, fault, generate, wait_ended, wait_logged

pytestmark = ON_REAL_SERVERS

ONES: Composition = (1, 1, 1, 1)
STOPS: list[Composition] = [(2, 2), (4,), (2, 1, 1), (2, 2), (4,), (1, 1, 2), (4,), ONES]
REQUESTS = 256
EPOCHS = count(1_000)
"""Above those of the engines that had the server before (`test_contract_sglang.py`)."""


@pytest.fixture(scope="module")
def listeners(four_units: Running) -> Iterator[list[Listener]]:
    """What was published before is replayed to them."""
    events = httpx.get(f"{four_units.url}/server_info", timeout=300.0).json()["kv_events"]
    context = zmq.Context()
    listeners = [Listener(context, "127.0.0.1", events, unit) for unit in range(4)]
    yield listeners
    for each in listeners:
        each.close()
    context.term()


@pytest.fixture
async def http(four_units: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with client(four_units.url) as http:
        yield http


@pytest.fixture
async def reference(fixed_server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with client(fixed_server.url) as http:
        yield http


@pytest.fixture
def verbs(http: httpx.AsyncClient) -> Verbs:
    return Verbs(http, 4)


async def test_a_chain_of_switches_under_traffic(
    http: httpx.AsyncClient, reference: httpx.AsyncClient, verbs: Verbs, listeners: list[Listener]
) -> None:
    prompts = mixed_prompts(REQUESTS, seed=5)
    answers = await expected(reference, prompts)
    if await verbs.composition() != ONES:
        await switched(verbs, EPOCHS, ONES)
    before = [listener.removed for listener in listeners]
    await travel(http, verbs, EPOCHS, STOPS, prompts, answers)
    for listener in listeners:
        listener.drain()
    removed = [listener.removed - earlier for listener, earlier in zip(listeners, before, strict=True)]
    assert min(removed) > 0, "prefixes pushed each other out on every unit"


async def test_events_alone_rebuild_every_units_tree(
    http: httpx.AsyncClient, verbs: Verbs, listeners: list[Listener]
) -> None:
    for listener in listeners:
        listener.drain()
    for state, listener in zip(await verbs.states(), listeners, strict=True):
        assert len(listener.blocks) * PAGE_TOKENS == state.total_tokens, state.unit
        assert listener.cleared >= 4, "each merge tells the tree from the beginning"
    fresh = random_prompt(640, 77)
    await generate(http, fresh, routed_dp_rank=2)
    listeners[2].drain()
    assert listeners[2].held(fresh, PAGE_TOKENS) == 640
    for prompt in (fresh, *mixed_prompts(6, seed=5)):
        promised = min(listeners[2].held(prompt, PAGE_TOKENS), (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS)
        assert (await generate(http, prompt, routed_dp_rank=2))[1] == promised
        listeners[2].drain()


async def test_one_prefix_is_evicted_in_a_merged_group(
    http: httpx.AsyncClient, verbs: Verbs, listeners: list[Listener]
) -> None:
    await switched(verbs, EPOCHS, (4,))
    prompt = random_prompt(2400, 78)
    fork = [*prompt[:960], *random_prompt(320, 79)]
    for each in (prompt, fork):
        await generate(http, each)
    digests = path_of(NOWHERE, array("I", prompt), PAGE_TOKENS).digests
    assert await verbs.evict(Group(0, 4), [block_hash(digests[100])])
    assert (await generate(http, prompt))[1] == 1600
    assert await verbs.evict(Group(0, 4), [block_hash(digests[40])]), "above the fork: both branches go"
    for listener in listeners:
        listener.drain()
        assert listener.held(prompt, PAGE_TOKENS) == listener.held(fork, PAGE_TOKENS) == 640
    assert (await generate(http, fork))[1] == 640
    assert not await verbs.evict(Group(0, 4), [block_hash(digests[100])]), "it is gone"
    await check_groups(verbs)


async def test_a_unit_that_is_not_ready_stops_a_switch(
    http: httpx.AsyncClient, reference: httpx.AsyncClient, verbs: Verbs, faults: Path
) -> None:
    await switched(verbs, EPOCHS, ONES)
    with fault(faults, "refuse-2"):
        result = await switch(verbs, next(EPOCHS), (4,), Limits(1.0, 3.0, 30.0), SystemClock())
    assert (result.made, result.composition) == (False, ONES)
    await _serves(http, reference, 1)


@pytest.mark.parametrize(("before", "after", "against"), [(ONES, (2, 2), 1), ((2, 2), (4,), 3)])
async def test_a_vote_against_it_leaves_everybody_where_they_were(
    http: httpx.AsyncClient,
    reference: httpx.AsyncClient,
    verbs: Verbs,
    faults: Path,
    before: Composition,
    after: Composition,
    against: int,
) -> None:
    """A leader's vote, and a follower's."""
    await switched(verbs, EPOCHS, before)
    with fault(faults, f"vote-no-{against}"):
        result = await switch(verbs, next(EPOCHS), after, PATIENT, SystemClock())
    assert (result.made, result.composition) == (False, before)
    await _serves(http, reference, 2 + against)
    await switched(verbs, EPOCHS, after)
    await _serves(http, reference, 3 + against)


async def test_a_stopped_unit_costs_its_mates_the_time_for_votes_and_the_others_nothing(
    http: httpx.AsyncClient, reference: httpx.AsyncClient, verbs: Verbs, four_units: Running
) -> None:
    await switched(verbs, EPOCHS, ONES)
    epoch, stopped = next(EPOCHS), (await verbs.states())[3].pid
    await prepared(verbs, epoch, (1, 1, 2))
    os.kill(stopped, signal.SIGSTOP)
    try:
        commit = asyncio.create_task(verbs.commit(epoch, (1, 1, 2), 3.0))
        prompt = random_prompt(200, 90)
        answer = (await generate(reference, prompt, NEW_TOKENS))[0]
        for unit in (0, 1, 0, 1):
            assert (await generate(http, prompt, NEW_TOKENS, routed_dp_rank=unit))[0] == answer
        await asyncio.to_thread(wait_logged, four_units, f"epoch {epoch}: abort")
    finally:
        os.kill(stopped, signal.SIGCONT)
    # Its mate had decided before it woke: it reads the decision, late.
    assert not await commit
    await verbs.release(epoch)
    assert await verbs.composition() == ONES
    await _serves(http, reference, 8)
    await switched(verbs, EPOCHS, (4,))
    await _serves(http, reference, 9)


async def test_a_client_that_dies_after_prepare_leaves_nothing_held(
    http: httpx.AsyncClient, reference: httpx.AsyncClient, verbs: Verbs, four_units: Running
) -> None:
    await switched(verbs, EPOCHS, ONES)
    epoch = next(EPOCHS)
    await verbs.prepare(epoch, (2, 2), 2.0)
    await _serves(http, reference, 10)
    assert f"epoch {epoch} has ended" in log_of(four_units)
    assert not await verbs.commit(epoch, (2, 2), 5.0), "too late"
    assert await verbs.composition() == ONES
    await switched(verbs, EPOCHS, (2, 2))


async def test_an_abort_of_all_requests_ends_held_ones_that_came_before_it_and_no_later_one(
    http: httpx.AsyncClient, reference: httpx.AsyncClient, verbs: Verbs
) -> None:
    await switched(verbs, EPOCHS, ONES)
    epoch, prompt = next(EPOCHS), random_prompt(150, 91)
    answer = (await generate(reference, prompt, NEW_TOKENS))[0]
    await prepared(verbs, epoch, (4,))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0}}
    before = [asyncio.create_task(http.post("/generate", json={**body, "routed_dp_rank": unit})) for unit in range(4)]
    for _ in range(10):  # they have reached the controller by one of these
        assert await verbs.prepare(epoch, (4,), PATIENT.lease_s)
        (await http.post("/abort_request", json={"abort_all": True})).raise_for_status()
    later = [asyncio.create_task(generate(http, prompt, NEW_TOKENS, routed_dp_rank=unit)) for unit in range(4)]
    assert await verbs.prepare(epoch, (4,), PATIENT.lease_s)
    assert not any(each.done() for each in (*before, *later)), "held"
    assert await verbs.commit(epoch, (4,), 30.0)
    await verbs.release(epoch)
    assert [(await each)[0] for each in later] == [answer] * 4
    for each in before:
        assert (await each).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_client_that_dies_after_commit_leaves_the_new_composition_serving(
    http: httpx.AsyncClient, reference: httpx.AsyncClient, verbs: Verbs, four_units: Running
) -> None:
    await switched(verbs, EPOCHS, (2, 2))
    epoch = next(EPOCHS)
    await prepared(verbs, epoch, (4,))
    assert await verbs.commit(epoch, (4,), 10.0)
    await _serves(http, reference, 11)
    assert f"epoch {epoch} has ended" in log_of(four_units)
    assert await verbs.composition() == (4,)
    await check_groups(verbs)
    await switched(verbs, EPOCHS, (1, 1, 2))
    await _serves(http, reference, 12)


@pytest.mark.parametrize(("dies", "decision"), [("die-1", "abort"), ("die-decided-1", "commit")])
async def test_a_rank_that_dies_in_a_commit_ends_the_server(
    kept_four: Kept, faults: Path, dies: str, decision: str
) -> None:
    """Before it votes, and when all have decided and its mates switch."""
    four_units = kept_four.get()
    async with client(four_units.url) as http:
        verbs = Verbs(http, 4)
        await switched(verbs, EPOCHS, ONES)
        epoch = next(EPOCHS)
        with fault(faults, dies), pytest.raises(Unreachable):
            await switch(verbs, epoch, (4,), Limits(600.0, 3.0, 300.0), SystemClock())
    wait_ended(four_units)
    assert f"vertumnus: epoch {epoch}: {decision}; " in log_of(four_units)


async def _serves(http: httpx.AsyncClient, reference: httpx.AsyncClient, seed: int) -> None:
    prompt = random_prompt(150, 200 + seed)
    await check_everywhere(http, prompt, (await generate(reference, prompt, NEW_TOKENS))[0], 4)
