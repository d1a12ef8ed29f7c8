"""A pool on an unmodified server of two ranks, whose degree is fixed: it serves, knows its cache, and says why it does not
switch. `doctor` and `profile` look at the same server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.sglang.pool import NODE, Pool, run, settings_of
from tests.sglang.traffic import random_prompt
from tests.support.adapter_servers import PAGE_TOKENS, Running, server

pytestmark = ON_REAL_SERVERS

DEGREE = 2


@pytest.fixture(scope="module")
def fixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    arguments = ("--tp-size", str(DEGREE))
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with server(model, tmp_path_factory.mktemp("fixed") / "log", *arguments, environment=cores) as running:
        yield running


@pytest.fixture(scope="module")
def environment(fixed: Running) -> dict[str, str]:
    return settings_of(fixed, DEGREE, adaptive=False)


def test_a_pool_serves_knows_what_is_cached_and_refuses_to_switch(
    model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    pool = Pool(tmp_path / "data", model, str(DEGREE), environment)
    try:
        prompt = random_prompt(200, 1)
        cold = pool.stream(prompt)
        assert (len(cold[0]), cold[1]) == (8, 0)
        assert pool.stream(prompt) == (cold[0], 200 // PAGE_TOKENS * PAGE_TOKENS)
        refused = pool.run("reconfigure", NODE, "1,1", fails=True)
        assert "degree" in refused, refused
        assert pool.composition() == str(DEGREE)
        pool.run("drain", NODE)
        pool.run("uncordon", NODE)
        assert pool.stream(prompt)[0] == cold[0]
        pool.run("events", "audit")
        pool.run("verify")
    finally:
        pool.up.end()


def test_doctor_says_what_fits_and_what_does_not(model: Path, environment: dict[str, str], fixed: Running) -> None:
    def findings(**more: str) -> list[tuple[bool, str]]:
        told = json.loads(
            run(environment | more, "doctor", "--sglang", "--json", "--model", str(model), fails=bool(more))
        )
        return [(each["ok"], each["found"]) for each in told if each["name"].startswith("SGLang")]

    ((fits, found),) = findings()
    assert fits
    assert "blocks of 16 tokens" in found
    alone = json.dumps([{"url": fixed.url, "degree": 1}])
    ((fits, found),) = findings(VERTUMNUS_SGLANG_SERVERS=alone, VERTUMNUS_BLOCK_TOKENS="64")
    assert not fits
    for words in ("2 GPUs, but sglang_servers says degree 1", "page_size: 16, but block_tokens is 64"):
        assert words in found


def test_a_profile_is_measured_at_the_server_s_degree(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    grid = ("--lengths", "64,256", "--hit-ratios", "0,0.5", "--repeats", "2", "--warmups", "0")
    asked = ("profile", "--engine", "sglang", "--model", str(model), "--out", str(out), *grid)
    run(environment, *asked, "--degrees", str(DEGREE))
    points = json.loads(out.read_text())["points"]
    assert {(each["degree"], each["uncached_tokens"], each["cached_tokens"]) for each in points} == {
        (DEGREE, 64, 0),
        (DEGREE, 32, 32),
        (DEGREE, 256, 0),
        (DEGREE, 128, 128),
    }
    assert all(seconds > 0 for each in points for seconds in each["seconds"])
    assert "this engine has [2]" in run(environment, *asked, "--degrees", "1", fails=True)
