"""sglang-router as a process, in front of workers that answer when they are told to."""

import asyncio
import logging
import sys
import tempfile
from itertools import count
from typing import Any, Self

from bench.peers_world import BLOCK_TOKENS, block_number
from cli.embedded.loopback import free_port
from shared.contracts.ids import RequestId, WorkerId
from simulation.baselines.rule import Prompt, WorkerView
from simulation.baselines.sglang import CacheAware

FIRST_CHARACTER, FIRST_TAIL = 0x4E00, 0xAC00
"""A character for each block and for each partial last block: the router matches text by characters."""

READY_S_MAX = 60.0


class SGLang:
    """The router with its command line's defaults. A request is outstanding until its worker answers."""

    def __init__(self, workers: int) -> None:
        self._rule, self._numbers = CacheAware(), count()
        self._workers = [_Worker(WorkerId(str(index))) for index in range(workers)]
        self._arrived: asyncio.Queue[tuple[WorkerId, asyncio.Event]] = asyncio.Queue()
        self._open: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def __aenter__(self) -> Self:
        import aiohttp

        # The router asks each worker in several protocols what it is, and those that aiohttp does not speak end up there.
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        urls = [await worker.serve(self._arrived) for worker in self._workers]
        port, metrics_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(prefix="sglang-router-", suffix=".log", delete=False)  # noqa: SIM115
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(metrics_port), "--worker-urls", *urls),
            stdout=self._log,
            stderr=self._log,
        )
        await asyncio.wait_for(self._ready(len(urls)), READY_S_MAX)
        return self

    async def __aexit__(self, *_: object) -> None:
        for answer, request in self._open:
            answer.set()
            await request
        self._process.terminate()
        await self._process.wait()
        await self._client.close()
        for worker in self._workers:
            await worker.close()
        self._log.close()

    async def ours(self, prompt: Prompt, views: list[WorkerView]) -> set[WorkerId]:
        """Our choices in every order of the workers: the router has its own, and takes the first of equally idle ones."""
        orders = (views[begin:] + views[:begin] for begin in range(len(views)))
        return {chosen for order in orders if (chosen := self._rule.choose(prompt, order)) is not None}

    async def place(self, prompt: Prompt) -> WorkerId:
        """The worker that the request comes to."""
        request = asyncio.create_task(self._ask(_text(prompt, next(self._numbers))))
        worker, answer = await asyncio.wait_for(self._arrived.get(), READY_S_MAX)
        self._open.append((answer, request))
        self._rule.placed(RequestId(str(len(self._open))), prompt, worker)
        return worker

    async def finished(self, ended: tuple[int, Prompt, WorkerId]) -> None:
        """The worker answers, and the router has counted it."""
        answer, request = self._open.pop(ended[0])
        answer.set()
        await request
        await asyncio.wait_for(self._counted(), READY_S_MAX)

    async def _ask(self, text: str) -> None:
        async with self._client.post(f"{self._url}/generate", json={"text": text}) as response:
            await response.read()
            assert response.status == 200, await response.text()

    async def _ready(self, workers: int) -> None:
        import aiohttp

        while True:
            try:
                async with self._client.get(f"{self._url}/workers") as response:
                    found = await response.json()
                    if sum(each["is_healthy"] for each in found["workers"]) == workers:
                        return
            except aiohttp.ClientError:
                assert self._process.returncode is None, f"the router has ended; its log is {self._log.name}"
            await asyncio.sleep(0.1)

    async def _counted(self) -> None:
        while True:
            async with self._client.get(f"{self._url}/workers") as response:
                found = await response.json()
            if sum(each["load"] for each in found["workers"]) == len(self._open):
                return
            await asyncio.sleep(0.001)


class _Worker:
    """Says that it is well, and holds each request until its event is set."""

    def __init__(self, name: WorkerId) -> None:
        self._name = name

    async def serve(self, arrived: "asyncio.Queue[tuple[WorkerId, asyncio.Event]]") -> str:
        """Its address."""
        from aiohttp import web

        async def generate(request: Any) -> Any:
            await request.read()
            answer = asyncio.Event()
            await arrived.put((self._name, answer))
            await answer.wait()
            return web.json_response({"text": "a"})

        async def other(_: Any) -> Any:
            return web.json_response({"model_path": "m", "served_model_name": "m"})

        application = web.Application(client_max_size=1 << 24)
        application.add_routes([web.post("/generate", generate), web.get("/{path:.*}", other)])
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()


def _text(prompt: Prompt, number: int) -> str:
    whole = "".join(chr(FIRST_CHARACTER + block_number(block)) * BLOCK_TOKENS for block in prompt.chain)
    return whole + chr(FIRST_TAIL + number) * (prompt.tokens - len(whole))
