"""What the order of a worker's queue does to TTFT: `python -m bench.worker_order [--requests N]`.

One worker process with a modelled CP4 worker, on an embedded NATS server of its own. The same burst of short and long prompts
is served twice: first come first served, a whole prompt a step, then shortest first with packed steps and chunks. Times are
those of the modelled worker, whose engine is a cost model that runs `SPEEDUP` times as fast as life.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, quantiles

import numpy as np

from cli.embedded.nats import EmbeddedNats
from shared.contracts.codec import decode
from shared.contracts.commands import Adopt, Assign, Claim, SamplingSpec, TokenFrame, encode_message
from shared.contracts.envelope import EventData
from shared.contracts.events import CommittedWorker, EpochCommitted, NodeRegistered, ParametersChanged
from shared.contracts.ids import NodeId, RequestId, RouterId, worker_id
from shared.model.blocks import block_chain
from shared.model.cost import Coefficients, load_coefficients
from shared.runtime.appending import NO_ORIGIN
from shared.runtime.service import Runtime, open_runtime
from shared.runtime.settings import ServiceSettings

NODE, RANKS, DEGREE = NodeId("n0"), 4, 4
WORKER = worker_id(NODE, 1, 0)
BLOCK_TOKENS = 64
ROUTER = RouterId("bench")
SPEEDUP = 5.0
SHORT_TOKENS, LONG_TOKENS, LONG_SHARE = (200, 2_000), (12_000, 40_000), 0.1
LOAD = 0.8
"""Predicted work per second of arrivals: near saturation, where the order matters."""


class Prompts:
    """The burst: arrival (modelled seconds), tokens, predicted seconds; the same for both orders."""

    def __init__(self, requests: int, coefficients: Coefficients) -> None:
        chance = random.Random(1)
        bounds = [LONG_TOKENS if chance.random() < LONG_SHARE else SHORT_TOKENS for _ in range(requests)]
        self.lengths = [chance.randint(*each) for each in bounds]
        self.costs_us = [coefficients.prefill_us(DEGREE, tokens, 0) for tokens in self.lengths]
        gap_s = mean(self.costs_us) / 1e6 / LOAD
        gaps = [chance.expovariate(1 / gap_s) for _ in range(requests)]
        self.arrivals_s = np.cumsum(gaps).tolist()


class Burst:
    """One serving of the prompts. Requests of different rounds share no block."""

    def __init__(self, runtime: Runtime, prompts: Prompts) -> None:
        self._runtime, self._prompts = runtime, prompts
        self._sealer = runtime.sealer("bench")
        self._registered = asyncio.Event()
        self._raw: dict[RequestId, bytes] = {}
        self._first: dict[RequestId, asyncio.Future[float]] = {}

    async def start(self) -> None:
        subjects = self._runtime.subjects
        await self._runtime.log.tail([subjects.all_events], 0, self._deliver)
        await self._runtime.bulk.subscribe(subjects.claim(ROUTER), self._claimed)
        await self._runtime.bulk.subscribe(subjects.all_frames(ROUTER), self._framed)
        await self._registered.wait()
        adopt = Adopt(term=1, node=NODE, incarnation=1, epoch=1, composition=(DEGREE,))
        await self._runtime.bus.request(subjects.agent(NODE), encode_message(adopt), 5.0)
        workers = (CommittedWorker(worker=WORKER, first_rank=0, degree=DEGREE, capacity_us=1),)
        await self.say(EpochCommitted(node=NODE, epoch=1, composition=(DEGREE,), workers=workers))

    async def say(self, fact: EventData) -> None:
        await self._runtime.log.append([entry for _, entry in self._sealer.seal([fact], NO_ORIGIN)], {})

    def _deliver(self, _subject: str, _seq: int, raw: bytes) -> None:
        if isinstance(decode(raw).data, NodeRegistered):
            self._registered.set()

    async def _claimed(self, _subject: str, payload: bytes) -> bytes:
        claim = Claim.model_validate_json(payload)
        return self._raw[claim.request][4 * claim.offset :]

    async def _framed(self, _subject: str, payload: bytes) -> None:
        frame = TokenFrame.model_validate_json(payload)
        if not self._first[frame.request].done():
            self._first[frame.request].set_result(time.monotonic())

    async def serve(self, round_number: int) -> list[float]:
        """TTFT of each request, modelled seconds."""
        assigns = [self._assign(round_number, number) for number in range(len(self._prompts.lengths))]
        began_s = time.monotonic()
        arrivals_s = (began_s + after_s / SPEEDUP for after_s in self._prompts.arrivals_s)
        return await asyncio.gather(*map(self._one, assigns, arrivals_s))

    def _assign(self, round_number: int, number: int) -> Assign:
        length = self._prompts.lengths[number]
        tokens = np.random.default_rng((round_number, number)).integers(0, 40_000, length, dtype=np.uint32)
        request = RequestId(f"{round_number}-{number}")
        self._raw[request] = tokens.astype("<u4").tobytes()
        self._first[request] = asyncio.get_running_loop().create_future()
        return Assign(
            request=request,
            attempt=1,
            router=ROUTER,
            router_source=ROUTER,
            worker=WORKER,
            decode_worker=None,
            prompt_tokens=length,
            block_ids=b"".join(block_chain(tokens, BLOCK_TOKENS, b"k")),
            max_new_tokens=1,
            sampling=SamplingSpec(temperature=0.0),
            service_us=round(self._prompts.costs_us[number] / SPEEDUP),
        )

    async def _one(self, assign: Assign, arrival_s: float) -> float:
        await asyncio.sleep(max(0.0, arrival_s - time.monotonic()))
        sent_s = time.monotonic()
        await self._runtime.bus.request(self._runtime.subjects.agent(NODE), encode_message(assign), 30.0)
        return (await self._first[assign.request] - sent_s) * SPEEDUP


def told(name: str, waits_s: list[float]) -> str:
    cuts = quantiles(waits_s, n=10)
    return f"{name:6} n={len(waits_s):4}: TTFT mean {mean(waits_s):7.2f} s, p50 {cuts[4]:7.2f} s, p90 {cuts[8]:7.2f} s"


async def measure(nats_url: str, requests: int) -> None:
    prompts = Prompts(requests, load_coefficients("qwen3_30b_a3b_h20"))
    is_long = [length > SHORT_TOKENS[1] for length in prompts.lengths]
    async with open_runtime(ServiceSettings(nats_url=nats_url, log_level="warning"), "bench") as runtime:
        burst = Burst(runtime, prompts)
        await burst.start()
        for number, order in enumerate(("fcfs", "shortest-first"), start=1):
            changed = ParametersChanged(parameters_version=number, changes={"worker_order": order}, asked_by="bench")
            await burst.say(changed)
            await asyncio.sleep(1)
            waits_s = await burst.serve(number)
            pairs = list(zip(waits_s, is_long, strict=True))
            print(order)
            print(" ", told("all", waits_s))
            print(" ", told("short", [wait for wait, long in pairs if not long]))
            print(" ", told("long", [wait for wait, long in pairs if long]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as directory, EmbeddedNats(Path(directory) / "nats", sync_always=False) as nats:
        settings = {
            "VERTUMNUS_NATS_URL": nats.url,
            "VERTUMNUS_ENGINE": "modelled",
            "VERTUMNUS_PREFILL_RANKS": str(RANKS),
            "VERTUMNUS_SPEEDUP": str(SPEEDUP),
            "VERTUMNUS_QUEUE_MAX": "10000",
            "VERTUMNUS_LOG_LEVEL": "warning",
        }
        worker = subprocess.Popen([sys.executable, "-m", "services.worker"], env={**os.environ, **settings})
        try:
            asyncio.run(measure(nats.url, requests))
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    main()
