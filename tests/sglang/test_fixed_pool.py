"""A pool on an unmodified server of two ranks, whose degree is fixed, and which its agent launches: `up` waits for it. It
serves, knows its cache, and says why it does not switch; `doctor` and `profile` look at the same server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.pool import NODE, Pool, run, settings_of
from tests.sglang.traffic import random_prompt
from tests.support.adapter_servers import PAGE_TOKENS, START_LIMIT_S, to_launch

pytestmark = ON_REAL_SERVERS

DEGREE = 2


@pytest.fixture(scope="module")
def environment(model: Path) -> dict[str, str]:
    """Of the pool's services. The server's own is told in its command."""
    server, command = to_launch(model, "--tp-size", str(DEGREE), SGLANG_CPU_OMP_THREADS_BIND="0|1")
    return settings_of(server, DEGREE, adaptive=False) | {
        "VERTUMNUS_SGLANG_LAUNCH": json.dumps(command),
        "VERTUMNUS_SGLANG_START_S": str(START_LIMIT_S),
    }


@pytest.fixture(scope="module")
def pool(model: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool") / "data", model, str(DEGREE), environment)
    yield pool
    pool.up.end()


def test_it_serves_knows_what_is_cached_and_refuses_to_switch(pool: Pool) -> None:
    prompt = random_prompt(200, 1)
    tokens, cached = pool.stream(prompt)
    assert (len(tokens), cached) == (8, 0)
    assert pool.stream(prompt) == (tokens, 200 // PAGE_TOKENS * PAGE_TOKENS)
    refused = pool.run("reconfigure", NODE, "1,1", fails=True)
    assert "degree" in refused, refused
    assert pool.composition() == str(DEGREE)
    pool.run("drain", NODE)
    pool.run("uncordon", NODE)
    assert pool.stream(prompt)[0] == tokens
    pool.run("events", "audit")
    pool.run("verify")


def test_doctor_says_what_fits_and_what_does_not(pool: Pool, model: Path, environment: dict[str, str]) -> None:
    def findings(**more: str) -> list[tuple[bool, str]]:
        asked = ("doctor", "--sglang", "--json", "--model", str(model))
        told = json.loads(run(environment | more, *asked, fails=None))
        return [(each["ok"], each["found"]) for each in told if each["name"].startswith("SGLang")]

    ((fits, found),) = findings()
    assert fits, found
    assert "blocks of 16 tokens" in found
    (server,) = json.loads(environment["VERTUMNUS_SGLANG_SERVERS"])
    alone = json.dumps([server | {"degree": 1}])
    ((fits, found),) = findings(VERTUMNUS_SGLANG_SERVERS=alone, VERTUMNUS_BLOCK_TOKENS="64")
    assert not fits
    for words in ("2 GPUs, but sglang_servers says degree 1", "page_size: 16, but block_tokens is 64"):
        assert words in found


def test_a_profile_is_measured_at_the_server_s_degree(
    pool: Pool, model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """On a server that is up already: nothing is launched for it."""
    out = tmp_path / "profile.json"
    joining = {name: value for name, value in environment.items() if name != "VERTUMNUS_SGLANG_LAUNCH"}
    grid = ("--lengths", "64,256", "--hit-ratios", "0,0.5", "--repeats", "2", "--warmups", "0")
    asked = ("profile", "--engine", "sglang", "--model", str(model), "--out", str(out), *grid)
    run(joining, *asked, "--degrees", str(DEGREE))
    points = json.loads(out.read_text())["points"]
    assert {(each["degree"], each["uncached_tokens"], each["cached_tokens"]) for each in points} == {
        (DEGREE, 64, 0),
        (DEGREE, 32, 32),
        (DEGREE, 256, 0),
        (DEGREE, 128, 128),
    }
    assert all(seconds > 0 for each in points for seconds in each["seconds"])
    assert "this engine has [2]" in run(joining, *asked, "--degrees", "1", fails=True)
