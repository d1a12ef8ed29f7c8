"""What a router adds to a request that it has served elsewhere: ours, `sglang-router` and `smg`, asked in turns by one client.

The other routers forward text to an engine that answers at once (`upstream.py`); what they take beyond asking it directly is
theirs. Ours has no such engine to be asked directly: it records, decides, hands over to an agent over the log and the bus, and
what is told is all of it, the agent and a modelled engine a thousand times as fast as life included. It takes token ids, which
it would have had to make of the text; the others do not tokenise. Bodies have the same number of bytes.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from bench.router.serving import connected, post, served
from bench.router.timing import HEADING, of
from bench.running import modelled
from cli.embedded.loopback import free_port

SIZES = (1 << 10, 32 << 10, 256 << 10)
ROUNDS = 100
CLIENTS, TOGETHER = 16, 600
SPEEDUP = 1_000


class Target(NamedTuple):
    """Somebody to be asked: where, which process, by what model's name, with text or with token ids."""

    url: str
    pid: int
    model: str
    text: bool

    def body(self, size: int, chance: random.Random, stream: bool) -> bytes:
        """A completion's, of that many bytes or a few fewer; no two are alike."""
        asked = {"model": self.model, "max_tokens": 1, "stream": stream}
        room = size - len(json.dumps({**asked, "prompt": ""}))
        if self.text:
            prompt: str | list[int] = chance.randbytes(room // 2).hex()
        else:
            prompt = [chance.randrange(1_000, 10_000) for _ in range(room // 6)]
        return json.dumps({**asked, "prompt": prompt}).encode()


def proxy(peers: Path | None) -> None:
    """`peers`: an environment's folder that has the other routers; None measures ours alone."""
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        if peers is not None:
            url, pid = stack.enter_context(served(_upstream(), _answers))
            targets["engine, asked directly"] = Target(url, pid, "m", True)
            for name, command in _peers(peers, url).items():
                targets[name] = Target(*stack.enter_context(served(command, _answers)), model="m", text=True)
        system = stack.enter_context(modelled(SPEEDUP))
        [router] = [
            child.pid for child in psutil.Process(system.pid).children() if "services.router" in child.cmdline()
        ]
        targets["vertumnus"] = Target(system.told["api_url"].removesuffix("/v1"), router, "modelled", False)
        for stream in (False, True):
            for size in SIZES:
                print(f"\n{size >> 10} KiB bodies, {'streamed' if stream else 'whole'} answers\n{HEADING}")
                _one_at_a_time(targets, size, stream)
        for size in SIZES:
            print(f"\n{size >> 10} KiB bodies, {CLIENTS} clients")
            for name, target in targets.items():
                print(f"{name:40} {asyncio.run(_together(target, size))}")


def _one_at_a_time(targets: Mapping[str, Target], size: int, stream: bool) -> None:
    connections = {name: connected(target.url) for name, target in targets.items()}
    taken: dict[str, list[int]] = {name: [] for name in targets}
    chance = random.Random(size)
    for _ in range(ROUNDS):
        for name, target in targets.items():
            body = target.body(size, chance, stream)
            began = time.perf_counter_ns()
            status, content = post(connections[name], "/v1/completions", body)
            taken[name].append(time.perf_counter_ns() - began)
            if status != 200:
                raise SystemExit(f"{name}: {status} {content[:500]!r}")
    for name, each in taken.items():
        print(f"{name:40} {of(each)}")


async def _together(target: Target, size: int) -> str:
    """Requests per second of the clock, and processor time of the router's process for each."""
    chance = random.Random(size + 1)
    bodies = iter([target.body(size, chance, stream=False) for _ in range(TOGETHER)])
    process, host = psutil.Process(target.pid), urlsplit(target.url)

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host.hostname, host.port, limit=1 << 20)
        for body in bodies:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host.netloc}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            told = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert told.startswith(b"http/1.1 200"), told
            length = next(line for line in told.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        writer.close()

    began, used = time.perf_counter(), sum(process.cpu_times()[:2])
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    seconds, used = time.perf_counter() - began, sum(process.cpu_times()[:2]) - used
    return f"{TOGETHER / seconds:8.0f} requests/s, {used / TOGETHER * 1e3:6.2f} ms of its processor time each"


def _upstream() -> list[str]:
    return [sys.executable, "-m", "uvicorn", "bench.router.upstream:app", "--log-level", "warning", "--port"]


def _peers(folder: Path, upstream: str) -> dict[str, list[str]]:
    urls, python = ["--worker-urls", upstream], str(folder / "bin/python")
    metrics = ["--prometheus-port", str(free_port())], ["--prometheus-port", str(free_port())]
    return {
        "sglang-router": [python, "-m", "sglang_router.launch_router", *urls, *metrics[0], "--port"],
        "smg": [str(folder / "bin/smg"), "launch", *urls, *metrics[1], "--port"],
    }


def _answers(url: str) -> bool:
    body = Target(url, 0, "m", True).body(SIZES[0], random.Random(0), stream=False)
    return post(connected(url), "/v1/completions", body)[0] == 200
