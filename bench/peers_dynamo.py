"""Dynamo's selection service in this process: it hears of caches by KV events, books what it selects, and is told of ends."""

import asyncio
import time
from typing import Any, Self

from bench.peers_world import BLOCK_TOKENS, block_number, token_ids
from shared.contracts.ids import WorkerId
from simulation.baselines.dynamo import cost_tokens
from simulation.baselines.rule import Prompt, WorkerView

MODEL = "m"
CONNECT_S = 1.0
HEARD_S_MAX = 30.0


class Dynamo:
    """The service adds the blocks that its reservations hold to the cost, as Dynamo does where workers decode too; for prefill
    workers it leaves them out, and so does our rule. So what the service says they would be is added to our cost here."""

    def __init__(self, workers: int) -> None:
        import zmq
        from dynamo._core import SelectionService

        self._service = SelectionService(indexer_threads=1)
        self._context = zmq.Context()
        self._publishers = [self._context.socket(zmq.PUB) for _ in range(workers)]
        self._events = [0] * workers
        self._held: list[set[int]] = [set() for _ in range(workers)]
        self._open: list[str] = []
        self._selections = 0

    async def __aenter__(self) -> Self:
        for index, publisher in enumerate(self._publishers):
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            await self._service.upsert_worker(
                {
                    "worker_id": index,
                    "model_name": MODEL,
                    "block_size": BLOCK_TOKENS,
                    "endpoint": "http://127.0.0.1:9",
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
                }
            )
        # A subscriber that connects late hears nothing of what was said before.
        await asyncio.sleep(CONNECT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._service.shutdown()
        self._context.destroy(linger=0)

    async def ours(self, prompt: Prompt, views: list[WorkerView]) -> set[WorkerId]:
        """The cheapest by our rule, with the blocks of reservations as the service would have them with this prompt."""
        loads = await self._service.potential_loads(self._request(prompt))
        blocks = {WorkerId(str(each["worker_id"])): each["potential_decode_blocks"] for each in loads}
        costs = {each.worker: cost_tokens(prompt, each) + blocks[each.worker] * BLOCK_TOKENS for each in views}
        least = min(costs.values())
        return {worker for worker, cost in costs.items() if cost == least}

    async def place(self, prompt: Prompt) -> WorkerId:
        """Its choice, booked."""
        self._selections += 1
        name = f"s{self._selections}"
        found = await self._service.select_and_reserve({**self._request(prompt), "selection_id": name})
        self._open.append(name)
        return WorkerId(str(found["worker_id"]))

    async def finished(self, ended: tuple[int, Prompt, WorkerId]) -> None:
        """A reservation ends, and its worker tells of the blocks that it has now."""
        at, prompt, worker = ended
        name = self._open.pop(at)
        await self._service.prefill_complete(name)
        await self._service.free_reservation(name)
        index, numbers = int(worker), [block_number(block) for block in prompt.chain]
        known = next((i for i, number in enumerate(numbers) if number not in self._held[index]), len(numbers))
        if known < len(numbers):
            self._held[index].update(numbers)
            self._tell(index, numbers, known, prompt)
            await self._heard(index, prompt)

    def _tell(self, index: int, numbers: list[int], known: int, prompt: Prompt) -> None:
        import msgpack

        tokens = list(token_ids(prompt))[known * BLOCK_TOKENS : len(numbers) * BLOCK_TOKENS]
        parent = numbers[known - 1] + 1 if known else None
        hashes = [number + 1 for number in numbers[known:]]
        batch = [time.time(), [["BlockStored", hashes, parent, tokens, BLOCK_TOKENS, None]], 0]
        self._publishers[index].send_multipart([b"", self._events[index].to_bytes(8, "big"), msgpack.packb(batch)])
        self._events[index] += 1

    async def _heard(self, index: int, prompt: Prompt) -> None:
        deadline = time.monotonic() + HEARD_S_MAX
        while time.monotonic() < deadline:
            scores = await self._service.overlap_scores(self._request(prompt))
            if any(
                each["worker_id"] == index and each["device_blocks"] == len(prompt.chain) for each in scores["workers"]
            ):
                return
            await asyncio.sleep(0.001)
        raise TimeoutError(
            f"the service has not heard of {len(prompt.chain)} blocks at worker {index} in {HEARD_S_MAX} s"
        )

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        return {"model_name": MODEL, "token_ids": token_ids(prompt)}
