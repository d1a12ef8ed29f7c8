"""This router beside sglang-router and smg, each in front of the same SGLang servers.

    python3 -m venv build/peers
    build/peers/bin/pip install sglang-router==0.3.2 smg==1.13.0
    python -m bench.sglang_routers --peers build/peers --model DIR --blocks N --servers http://127.0.0.1:30000 http://127.0.0.1:30100

The servers are unmodified, serve the model in DIR one GPU each, and are started with `--enable-metrics` and what docs/sglang.md
asks of fixed ones. In every round each router in turn gets the same prompts, whose prefixes are shared, and begins with empty
caches; the order changes from round to round. Hits are what the servers themselves count. TTFT is the whole time of a
completion of one token. Only figures of one run are comparable: what else the machine does, it does to all of them.
"""

import argparse
import asyncio
import json
import re
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.router.serving import connected, served
from bench.running import System, system
from cli.embedded.loopback import free_port
from shared.runtime.clock import SystemClock

LETTERS = "abcdefghijklmnopqrstuvwxyz "
COUNTED = re.compile(r'^sglang:prefill_effective_tokens_total{.*mode="(input|device_hit)".*} (\S+)$', re.MULTILINE)
"""Computed and cached tokens of prompts."""

READY_S_MAX = 600.0
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Found:
    """What one router came to. `answers` are the texts after each prompt of a part of them."""

    ttft_s: list[float] = field(default_factory=list)
    computed_tokens: list[float] = field(default_factory=list)
    cached_tokens: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Of all prompt tokens."""
        return sum(self.cached_tokens) / (sum(self.cached_tokens) + sum(self.computed_tokens))


def prompts_of(options: argparse.Namespace, seed: int) -> list[str]:
    """Prompts of a few prefixes, Zipf, each with an end of its own."""
    chance = Random(seed)

    def text(length: int) -> str:
        return "".join(chance.choice(LETTERS) for _ in range(length))

    prefixes = [text(options.prefix) for _ in range(options.prefixes)]
    weights = [1 / rank for rank in range(1, options.prefixes + 1)]
    return [chance.choices(prefixes, weights)[0] + text(chance.randint(20, 120)) for _ in range(options.requests)]


def ours(options: argparse.Namespace) -> AbstractContextManager[System]:
    """`vertumnus up` on the same servers."""
    named = {
        "SGLANG_SERVERS": json.dumps([{"url": url, "degree": 1} for url in options.servers]),
        "BLOCK_TOKENS": str(options.block_tokens),
        "BLOCKS_PER_RANK": str(options.blocks),
        "CONTEXT_TOKENS_MAX": str(options.context),
    }
    composition = ",".join("1" * len(options.servers))
    return system(
        *("--engine", "sglang", "--model", str(options.model), "--composition", composition),
        **{f"VERTUMNUS_{name}": value for name, value in named.items()},
    )


def peer(options: argparse.Namespace, *module: str) -> AbstractContextManager[tuple[str, int]]:
    """sglang-router or smg with the defaults of its command line."""
    metrics = ("--prometheus-port", str(free_port()))
    return served(
        [str(options.peers / "bin/python"), "-m", *module, *metrics, "--worker-urls", *options.servers, "--port"],
        _has_models,
    )


def _has_models(url: str) -> bool:
    connection = connected(url)
    connection.request("GET", "/v1/models")
    return connection.getresponse().status == 200


class Client:
    """Of one router: `ready`, then `complete`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http, self._model = http, ""

    async def ready(self) -> None:
        """Until the router has found its workers and what they serve."""
        async with asyncio.timeout(READY_S_MAX):
            while True:
                if await self._works():
                    return
                await asyncio.sleep(0.5)

    async def _works(self) -> bool:
        try:
            models = await self._http.get("/v1/models")
            if models.is_success and models.json()["data"]:
                self._model = models.json()["data"][0]["id"]
                return bool(await self.complete("a", 1))
        except httpx.HTTPError:
            pass
        return False

    async def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        """Greedy."""
        asked = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = (await self._http.post("/v1/completions", json=asked)).raise_for_status().json()
        return answer


async def counted(servers: Sequence[str]) -> dict[str, float]:
    """Computed and cached tokens of all servers so far."""
    totals = {"input": 0.0, "device_hit": 0.0}
    async with httpx.AsyncClient(timeout=READY_S_MAX) as http:
        for url in servers:
            text = (await http.get(f"{url}/metrics")).raise_for_status().text
            for mode, value in COUNTED.findall(text):
                totals[mode] += float(value)
    return totals


async def empty(servers: Sequence[str]) -> None:
    """Nothing is cached, and the pool knows it."""
    async with httpx.AsyncClient(timeout=READY_S_MAX) as http:
        for url in servers:
            (await http.post(f"{url}/flush_cache?timeout=60")).raise_for_status()
    await asyncio.sleep(2)


async def measure(router: Client, prompts: Sequence[str], options: argparse.Namespace, found: Found) -> None:
    """Every prompt once, so many at a time."""
    await empty(options.servers)
    before, clock, waiting = await counted(options.servers), SystemClock(), iter(prompts)

    async def one_after_the_other() -> None:
        for prompt in waiting:
            began_ns = clock.monotonic_ns()
            await router.complete(prompt, 1)
            found.ttft_s.append((clock.monotonic_ns() - began_ns) / 1e9)

    await asyncio.gather(*(one_after_the_other() for _ in range(options.clients)))
    after = await counted(options.servers)
    found.computed_tokens.append(after["input"] - before["input"])
    found.cached_tokens.append(after["device_hit"] - before["device_hit"])


async def answers(router: Client, prompts: Sequence[str], found: Found) -> None:
    """What is generated after each."""
    for prompt in prompts:
        found.answers.append((await router.complete(prompt, ANSWER_TOKENS))["choices"][0]["text"])


async def compare(routers: dict[str, str], options: argparse.Namespace) -> dict[str, Found]:
    """Rounds over all routers."""
    found = {name: Found() for name in routers}
    names = list(routers)
    for number in range(options.rounds):
        prompts = prompts_of(options, number)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            async with httpx.AsyncClient(base_url=routers[name], timeout=READY_S_MAX) as http:
                router = Client(http)
                await router.ready()
                await measure(router, prompts, options, found[name])
                if number == 0:
                    await answers(router, prompts[: options.answers], found[name])
    return found


def show(found: dict[str, Found], first: str) -> None:
    """As a table, times also against the first router's."""
    table = Table("router", "requests", "equal answers", "hit rate", "TTFT mean", "p50", "p90", "mean ÷ ours")
    mine = found[first]
    for name, each in found.items():
        equal = sum(a == b for a, b in zip(each.answers, mine.answers, strict=True))
        tenths = statistics.quantiles(each.ttft_s, n=10)
        mean = statistics.mean(each.ttft_s)
        table.add_row(
            name,
            str(len(each.ttft_s)),
            f"{equal} of {len(mine.answers)}",
            f"{each.hit_rate:.1%}",
            *(f"{1e3 * value:.0f} ms" for value in (mean, tenths[4], tenths[8])),
            f"{mean / statistics.mean(mine.ttft_s):.2f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--blocks", type=int, required=True, help="of each server: max_total_num_tokens ÷ page_size")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"), help="the environment of the other routers")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--context", type=int, default=4_096)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=1_000, help="characters")
    parser.add_argument("--requests", type=int, default=80, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--answers", type=int, default=20)
    options = parser.parse_args()
    with ExitStack() as stack:
        routers = {
            "vertumnus": stack.enter_context(ours(options)).told["api_url"].removesuffix("/v1"),
            "sglang-router 0.3.2": stack.enter_context(peer(options, "sglang_router.launch_router"))[0],
            "smg 1.13.0": stack.enter_context(peer(options, "smg", "launch"))[0],
        }
        show(asyncio.run(compare(routers, options)), "vertumnus")


if __name__ == "__main__":
    main()
