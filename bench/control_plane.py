"""`python -m bench.control_plane`: what everything but the engine costs, over the running services.

Starts `vertumnus up` with the modelled engine a thousand times as fast as life, so that prefills take next to nothing, and
sends completions of 512 token ids: one at a time for the overhead, sixteen at a time for the throughput. Overhead is read
from the record: from `request-received` at the router to `prefill-started` at the agent, both by this machine's wall clock.
"""

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.running import modelled

SPEEDUP = 1_000
ONE_AT_A_TIME = 300
TOGETHER = 2_000
CLIENTS = 16
PROMPT_TOKENS = 512


def main() -> None:
    begun = time.monotonic()
    with modelled(SPEEDUP) as system:
        print(f"ready after {time.monotonic() - begun:.1f} s")
        time.sleep(5)
        memory(system.pid)
        asyncio.run(measure(system.told, system.operator_key))


def memory(pid: int) -> None:
    """Resident memory of each child while nothing is asked."""
    for child in psutil.Process(pid).children():
        name = next((word for word in child.cmdline() if "services." in word), Path(child.cmdline()[0]).name)
        print(f"idle {name}: {child.memory_info().rss / 2**20:.0f} MiB")


async def measure(system: dict[str, Any], key: str) -> None:
    chance = random.Random(1)
    bodies = [
        {"model": "modelled", "max_tokens": 1, "prompt": [chance.randrange(256, 30_000) for _ in range(PROMPT_TOKENS)]}
        for _ in range(ONE_AT_A_TIME + TOGETHER)
    ]
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=system["api_url"], timeout=30, limits=limits) as api:
        for body in bodies[:ONE_AT_A_TIME]:
            (await api.post("/completions", json=body)).raise_for_status()
        await asyncio.sleep(2)
        await overhead(system, key)
        waiting = iter(bodies[ONE_AT_A_TIME:])

        async def client() -> None:
            for body in waiting:
                (await api.post("/completions", json=body)).raise_for_status()

        begun = time.monotonic()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        print(f"one router, {CLIENTS} clients: {TOGETHER / (time.monotonic() - begun):.0f} requests/s")


async def overhead(system: dict[str, Any], key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    times: dict[str, dict[str, int]] = {"request-received": {}, "prefill-started": {}}
    async with httpx.AsyncClient(base_url=system["console_url"], headers=headers) as record:
        for kind, found in times.items():
            answer = await record.get("/v1/events", params={"type": kind, "limit": ONE_AT_A_TIME})
            for event in answer.raise_for_status().json()["events"]:
                found[event["data"]["request"]] = event["time_ns"]
    received, started = times.values()
    spent_ms = sorted((started[request] - received[request]) / 1e6 for request in received)
    p99 = statistics.quantiles(spent_ms, n=100)[98]
    print(
        f"router receive to worker start, {len(spent_ms)} requests: p50 {statistics.median(spent_ms):.2f} ms, p99 {p99:.2f} ms"
    )


if __name__ == "__main__":
    main()
