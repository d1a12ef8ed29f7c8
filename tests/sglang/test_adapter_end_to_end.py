"""An OpenAI client, router, agent, a prefill server that changes its degree, and two decode servers that are never told.

Everything is real: `vertumnus up` with NATS, Postgres and five services, the three servers, and their transfer engine. Faults
are made inside the prefill server, on demand (`deploy/sglang-cpu`). The tests follow each other on one pool, whose record
verifies after all of it."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Event

import openai
import pytest
from openai.types import Completion

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.pool import NODE, TRIES, Pool, tokens_of
from tests.sglang.world import ONES, World
from tests.support.adapter_servers import CAPACITY_TOKENS, has_ended, log_of, wait_running
from tests.support.switching_servers import fault

pytestmark = ON_REAL_SERVERS

AT_ONCE = 4


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(model, tmp_path_factory.mktemp("world"), stack)


@pytest.fixture
def pool(world: World) -> Pool:
    return world.pool


@contextmanager
def asking(world: World) -> Iterator[None]:
    """Clients that go on asking while the block runs. No answer that has begun is lost, or has other tokens than it should; a
    request may be refused with 503, which says to ask again, while nobody knows yet that the only agent is gone."""
    over = Event()

    def ask(first: int) -> None:
        for turn in count(first):
            if over.is_set():
                return
            index = turn % len(world.prompts)
            try:
                chunks = world.pool.open(world.prompts[index])
            except openai.InternalServerError as refused:
                if refused.status_code != 503:
                    raise
            else:
                assert [token for chunk in chunks for token in tokens_of(chunk)] == world.expected[index]

    with ThreadPoolExecutor(AT_ONCE) as clients:
        asked = [clients.submit(ask, first) for first in range(AT_ONCE)]
        try:
            yield
        finally:
            over.set()
    for each in asked:
        each.result()


def test_answers_stay_the_same_through_splits_and_merges_under_traffic(world: World, pool: Pool) -> None:
    """Meanwhile the agent is asked again and again what its workers hold."""
    assert all(len(tokens) == 8 for tokens in world.expected)
    assert len({tuple(tokens) for tokens in world.expected}) > 4
    for composition in ("2,2", "4", "2,1,1", ONES):
        with ThreadPoolExecutor(AT_ONCE) as clients:
            asked = [clients.submit(pool.stream, prompt) for prompt in world.prompts]
            pool.reconfigure(composition)
            while not all(each.done() for each in asked):
                pool.report()
        assert [each.result()[0] for each in asked] == world.expected, composition
        pool.report()
    assert any(pool.stream(prompt)[1] for prompt in world.prompts), "a split keeps every prefix"


def test_streams_are_decoded_where_the_fewest_tokens_are_reserved(world: World, pool: Pool) -> None:
    """Two at a time fit into a decode server with all that they may generate: one more would wait for the end of another."""
    prompt, expected = min(zip(world.prompts, world.expected, strict=True), key=lambda each: len(each[0]))
    assert 2 * (len(prompt) + 2_000) < CAPACITY_TOKENS
    with ExitStack() as open_streams:
        streams = [open_streams.enter_context(pool.open(prompt, new_tokens=2_000)) for _ in range(4)]
        chunks = [[next(stream) for _ in range(4)] for stream in streams]
        ids = [each[0].id.removeprefix("cmpl-") for each in chunks]
        assert pool.decode_ranks(ids) == [[f"{NODE}/decode/{rank}"] for rank in (0, 1, 0, 1)]
        wait_running(world.decode, [2, 2])
    begun = [[token for chunk in each for token in tokens_of(chunk)] for each in chunks]
    for tokens in begun:
        assert tokens[:4] == expected[:4], "a stream from either server begins with the same tokens"


def test_a_unit_that_is_not_ready_stops_a_switch(world: World, pool: Pool) -> None:
    before = len(pool.aborts())
    with fault(world.faults, "refuse-2"):
        world.ask("4", lambda: any("not ready" in reason for reason in pool.aborts()[before:]))
    assert (pool.composition(), pool.answers(world.prompts)) == (ONES, world.expected)


@pytest.mark.parametrize(("before", "after", "against"), [(ONES, "2,2", 1), ("2,2", "4", 3)])
def test_a_vote_against_it_leaves_everybody_where_they_were(
    world: World, pool: Pool, before: str, after: str, against: int
) -> None:
    """A leader's vote, and a follower's."""
    pool.reconfigure(before)
    with fault(world.faults, f"vote-no-{against}"):
        world.ask(after, world.aborted())
    assert (pool.composition(), pool.answers(world.prompts)) == (before, world.expected)
    pool.reconfigure(after)
    assert pool.answers(world.prompts) == world.expected


def test_a_unit_that_stops_before_it_votes_costs_one_switch(world: World, pool: Pool) -> None:
    pool.reconfigure(ONES)
    pid = world.pid(3)
    try:
        with fault(world.faults, "stop-3"):
            world.ask("1,1,2", world.aborted())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (pool.composition(), pool.answers(world.prompts)) == (ONES, world.expected)
    assert pool.node()["incarnation"] == 1
    pool.reconfigure("1,1,2")
    assert pool.answers(world.prompts) == world.expected


@pytest.mark.parametrize("dies", ["die-1", "die-decided-1"])
def test_a_rank_that_dies_in_a_commit_costs_the_node_one_life(world: World, pool: Pool, dies: str) -> None:
    """Before it votes, and when all have decided and its mates switch."""
    pool.reconfigure(ONES)
    with fault(world.faults, dies):
        world.ask("4", lambda: has_ended(world.prefill))
    world.replace_prefill()


def test_a_follower_that_dies_in_a_merged_group_costs_the_node_one_life(world: World, pool: Pool) -> None:
    pool.reconfigure("4")
    os.kill(world.pid(2), signal.SIGKILL)
    world.replace_prefill()


@pytest.mark.parametrize(("after", "composition"), [("prepare", "4"), ("commit", "2,2")])
def test_an_agent_that_dies_in_a_switch_leaves_nothing_held_and_nothing_lost(
    world: World, pool: Pool, after: str, composition: str
) -> None:
    """Work that comes to the server meanwhile waits for the end of the lease; the pool's own goes on with the next agent."""
    for _ in range(TRIES):
        pool.reconfigure(ONES)
        life = int(pool.node()["incarnation"])
        with asking(world):
            epoch = world.kill_agent(after, composition)
            lease_ended = f"the lease of epoch {epoch} has ended"
            in_time = lease_ended not in log_of(world.prefill)
            assert world.generate(world.prompts[0]) == world.expected[0]
            in_time &= lease_ended in log_of(world.prefill)
            pool.wait_life(life + 1)
        assert world.composition() == pool.composition() == ONES, "what the log has committed"
        in_time &= f"epoch {epoch}: {'commit' if after == 'commit' else 'abort'}, in force" in log_of(world.prefill)
        if in_time:
            break
    else:
        raise AssertionError(f"no agent died in time in {TRIES} tries")
    assert pool.answers(world.prompts) == world.expected


def test_a_decode_server_that_dies_loses_no_stream_and_is_taken_again(world: World, pool: Pool) -> None:
    def read(stream: openai.Stream[Completion]) -> list[int]:
        return [token for chunk in stream for token in tokens_of(chunk)]

    whole = read(pool.open(world.prompts[1], new_tokens=600))
    streams = [pool.open(world.prompts[1], new_tokens=600) for _ in range(2)]
    begun = [next(stream) for stream in streams]
    os.killpg(world.decode[1].pid, signal.SIGKILL)
    for chunk, stream in zip(begun, streams, strict=True):
        assert [*tokens_of(chunk), *read(stream)] == whole
    ids = [chunk.id.removeprefix("cmpl-") for chunk in begun]
    first, second = pool.decode_ranks(ids)
    assert (first, second[0], len(second) > 1) == ([f"{NODE}/decode/0"], f"{NODE}/decode/1", True)
    assert pool.answers(world.prompts) == world.expected
    world.replace_decode(1)
    with ExitStack() as open_streams:
        again = [open_streams.enter_context(pool.open(world.prompts[0], new_tokens=3_000)) for _ in range(2)]
        for stream in again:
            next(stream)
        wait_running(world.decode, [1, 1])


def test_doctor_finds_all_servers_fit(world: World, pool: Pool, model: Path) -> None:
    found = json.loads(pool.run("doctor", "--sglang", "--json", "--model", str(model), fails=None))
    servers = [(each["name"], each["ok"]) for each in found if each["name"].startswith("SGLang")]
    assert servers == [("SGLang prefill", True), ("SGLang decode", True), ("SGLang decode", True)], found


def test_the_record_explains_and_verifies(world: World, pool: Pool) -> None:
    pool.stream(world.prompts[0])
    told = json.loads(pool.run("explain", pool.last_id, "--json"))
    assert told["end"]["type"] == "request-completed"
    assert len(told["attempts"]) == 1
    assert pool.last_id.removeprefix("cmpl-") in pool.run("explain", pool.last_id)
    assert NODE in pool.run("status")
    pool.run("events", "audit")
    pool.run("verify")


def test_no_report_says_anything_else_than_the_events_before_it(pool: Pool) -> None:
    pool.report()
    assert any(each["number"] for each in pool.events("cache-reported")), "reports of workers that had told of changes"
    assert pool.holders().drifted_blocks == 0


def test_a_profile_is_measured_at_every_degree(world: World, pool: Pool, model: Path, tmp_path: Path) -> None:
    """The last test of the module: the servers are the profile's alone."""
    world.end()
    pool.run(
        *("profile", "--engine", "sglang", "--model", str(model), "--out", str(tmp_path / "profile.json")),
        *("--degrees", "1,2,4", "--lengths", "64,256", "--hit-ratios", "0,0.5", "--repeats", "1", "--warmups", "0"),
    )
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert {point["degree"] for point in profile["points"]} == {1, 2, 4}
