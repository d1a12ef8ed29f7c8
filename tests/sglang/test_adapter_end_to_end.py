"""An OpenAI client, router, agent, a prefill server that changes its degree, and a decode server that is never told.

Everything is real: `vertumnus up` with NATS, Postgres and five services, the two servers, and their transfer engine. Faults are
made inside the prefill server, on demand (`deploy/sglang-cpu`). The tests follow each other on one pool, whose record verifies
after all of it."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.pool import NODE, POLLS, TRIES, Pool, settings_of
from tests.sglang.traffic import mixed_prompts
from tests.support.adapter_servers import DECODE, PREFILL, Running, has_ended, launched, log_of, wait_up
from tests.support.switching_servers import fault, wait_ended

pytestmark = ON_REAL_SERVERS

UNITS = 4
ONES = "1,1,1,1"
AT_ONCE = 4


class World:
    """Two servers and a pool on them."""

    def __init__(self, model: Path, directory: Path, stack: ExitStack) -> None:
        self._model, self._directory, self._stack = model, directory, stack
        self.faults = directory / "faults"
        self.faults.mkdir()
        self.prefill = self._prefill(0)
        self.decode = stack.enter_context(launched(model, directory / "decode.log", *DECODE))
        wait_up(self.prefill, self.decode)
        self.environment = settings_of(self.prefill, UNITS, [self.decode])
        self.pool = Pool(directory / "data", model, ONES, self.environment)
        stack.callback(self.end)
        self.prompts = mixed_prompts(8, seed=21)
        self.expected = self.pool.answers(self.prompts)

    def _prefill(self, life: int, port: int | None = None) -> Running:
        return self._stack.enter_context(
            launched(
                self._model,
                self._directory / f"prefill-{life}.log",
                *PREFILL,
                units=UNITS,
                environment={"VERTUMNUS_SGLANG_FAULTS": str(self.faults)},
                port=port,
            )
        )

    def ask(self, composition: str, holds: Callable[[], bool]) -> None:
        """Ask for a composition until something has come of it inside the server: a busy one may not be ready in time."""
        for _ in range(TRIES):
            self.pool.run("reconfigure", NODE, composition, check=False)
            for _ in range(POLLS):
                if holds():
                    return
                time.sleep(1.0)
        raise AssertionError(f"nothing came of {composition} in {TRIES} tries")

    def aborted(self) -> Callable[[], bool]:
        """Whether a vote has gone against a switch from now on."""
        before = log_of(self.prefill).count(": abort")
        return lambda: log_of(self.prefill).count(": abort") > before

    def replace_prefill(self) -> None:
        """A server has died, and whoever keeps it starts it again; the node comes back by itself."""
        wait_ended(self.prefill)
        life = int(self.pool.node()["incarnation"])
        self.prefill = self._prefill(life, urlsplit(self.prefill.url).port)
        wait_up(self.prefill)
        self.pool.wait_life(life + 1)
        assert self.pool.answers(self.prompts) == self.expected

    def pid(self, unit: int) -> int:
        """Of the process of a unit."""
        states = httpx.get(f"{self.prefill.url}/server_info", timeout=300).json()["internal_states"]
        (pid,) = [each["vertumnus"]["pid"] for each in states if each["vertumnus"]["unit"] == unit]
        return int(pid)

    def end(self) -> None:
        """Safe to repeat."""
        if self.pool.up.process.poll() is None:
            self.pool.up.end()


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(model, tmp_path_factory.mktemp("world"), stack)


@pytest.fixture
def pool(world: World) -> Pool:
    return world.pool


def test_answers_stay_the_same_through_splits_and_merges_under_traffic(world: World, pool: Pool) -> None:
    assert all(len(tokens) == 8 for tokens in world.expected)
    assert len({tuple(tokens) for tokens in world.expected}) > 4
    for composition in ("2,2", "4", "2,1,1", ONES):
        with ThreadPoolExecutor(AT_ONCE) as clients:
            answers = clients.map(pool.stream, world.prompts)
            pool.reconfigure(composition)
            assert [tokens for tokens, _ in answers] == world.expected, composition
    assert any(pool.stream(prompt)[1] for prompt in world.prompts), "a split keeps every prefix"


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


def test_a_rank_that_dies_in_a_commit_costs_the_node_one_life(world: World, pool: Pool) -> None:
    pool.reconfigure(ONES)
    with fault(world.faults, "die-1"):
        world.ask("4", lambda: has_ended(world.prefill))
    world.replace_prefill()


def test_a_follower_that_dies_in_a_merged_group_costs_the_node_one_life(world: World, pool: Pool) -> None:
    pool.reconfigure("4")
    os.kill(world.pid(2), signal.SIGKILL)
    world.replace_prefill()


def test_doctor_finds_both_servers_fit(world: World, pool: Pool, model: Path) -> None:
    found = json.loads(pool.run("doctor", "--sglang", "--json", "--model", str(model), check=False))
    checks = {each["name"]: each for each in found}
    assert checks["SGLang prefill"]["ok"], checks
    assert checks["SGLang decode"]["ok"], checks


def test_the_record_explains_and_verifies(world: World, pool: Pool) -> None:
    pool.stream(world.prompts[0])
    told = json.loads(pool.run("explain", pool.last_id, "--json"))
    assert told["end"]["type"] == "request-completed"
    assert len(told["attempts"]) == 1
    assert pool.last_id.removeprefix("cmpl-") in pool.run("explain", pool.last_id)
    pool.run("events", "audit")
    pool.run("verify")


def test_a_profile_is_measured_at_every_degree(world: World, pool: Pool, model: Path, tmp_path: Path) -> None:
    """The last test of the module: the servers are the profile's alone."""
    world.end()
    pool.run(
        *("profile", "--engine", "sglang", "--model", str(model), "--out", str(tmp_path / "profile.json")),
        *("--degrees", "1,2,4", "--lengths", "64,256", "--hit-ratios", "0,0.5", "--repeats", "1", "--warmups", "0"),
    )
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert {point["degree"] for point in profile["points"]} == {1, 2, 4}
