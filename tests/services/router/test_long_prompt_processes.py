"""Prompts of 128K tokens through real processes: they are served, and a router's memory follows what their bodies have."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from router_pool import MODEL, RouterPool, pool_at_work

TOKENS = 131_072
TOGETHER, ROUNDS = 4, 3
BODIES_MAX = 24
"""Times its body that a request may take for a moment: the bytes, the list of numbers that JSON makes of them (eight times as
large), and the numbers packed. However many were served before: the bound is for those that are open together."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RouterPool]:
    context = {"VERTUMNUS_CONTEXT_TOKENS_MAX": str(TOKENS + 1_024)}
    with pool_at_work(tmp_path, speedup=1_000, worker=context) as made:
        yield made


async def test_memory_follows_the_bodies_that_are_open(pool: RouterPool) -> None:
    bodies = [
        json.dumps({"model": MODEL, "max_tokens": 1, "prompt": [n] * TOKENS}) for n in range(1_000, 1_000 + ROUNDS)
    ]
    resident_mib = [pool.router.resident_mib]
    async with httpx.AsyncClient(timeout=120) as http:
        for body in bodies:
            asked = [http.post(f"{pool.api}/completions", content=body) for _ in range(TOGETHER)]
            answers = [answer.json() for answer in await asyncio.gather(*asked)]
            assert [answer["usage"]["prompt_tokens"] for answer in answers] == [TOKENS] * TOGETHER
            resident_mib.append(pool.router.resident_mib)
    allowed_mib = BODIES_MAX * TOGETHER * len(bodies[0]) / 2**20
    assert max(resident_mib) - resident_mib[0] < allowed_mib
