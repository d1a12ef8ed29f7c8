"""What a worker process costs beside its engine: `python -m bench.worker_agent`.

One process stands for five nodes of eight modelled ranks, on an embedded NATS server of its own. Idle CPU and memory first;
then requests, whose modelled steps take next to no time, at one at a time (latency) and at 32 at a time (CPU per request).
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles

import numpy as np

from cli.embedded.nats import EmbeddedNats
from shared.contracts.codec import decode
from shared.contracts.commands import Adopt, Assign, Claim, SamplingSpec, TokenFrame, encode_message
from shared.contracts.envelope import Envelope
from shared.contracts.events import CommittedWorker, EpochCommitted, NodeRegistered, PrefillStarted
from shared.contracts.ids import NodeId, RequestId, RouterId, WorkerId, decode_worker_id, node_of, worker_id
from shared.model.blocks import block_chain
from shared.runtime.appending import NO_ORIGIN
from shared.runtime.service import Runtime, open_runtime
from shared.runtime.settings import ServiceSettings

NODES = tuple(NodeId(f"n{index}") for index in range(5))
RANKS = 8
IDLE_S = 10.0
PROMPT_TOKENS = 2_048
BLOCK_TOKENS = 64
ROUTER = RouterId("bench")


class Bench:
    """A router and a controller in one, as small as they can be."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._registered: set[NodeId] = set()
        self._complete = asyncio.Event()
        self.started_ns: dict[RequestId, int] = {}
        self.sent_ns: dict[RequestId, int] = {}
        self.first_ns: dict[RequestId, int] = {}
        self._finished: dict[RequestId, asyncio.Event] = {}
        tokens = np.random.default_rng(1).integers(0, 40_000, PROMPT_TOKENS, dtype=np.uint32)
        self._raw = tokens.astype("<u4").tobytes()
        self._chain = b"".join(block_chain(tokens, BLOCK_TOKENS, b"k"))

    async def start(self) -> None:
        subjects = self.runtime.subjects
        await self.runtime.log.tail([subjects.all_events], 0, self._deliver)
        await self.runtime.bulk.subscribe(subjects.claim(ROUTER), self._claimed)
        await self.runtime.bulk.subscribe(subjects.all_frames(ROUTER), self._framed)

    def _deliver(self, _subject: str, _seq: int, raw: bytes) -> None:
        envelope: Envelope = decode(raw)
        match envelope.data:
            case NodeRegistered() as data:
                self._registered.add(data.node)
                if self._registered == set(NODES):
                    self._complete.set()
            case PrefillStarted() as data:
                self.started_ns[data.request] = envelope.time_ns
            case _:
                pass

    async def _claimed(self, _subject: str, payload: bytes) -> bytes:
        return self._raw[4 * Claim.model_validate_json(payload).offset :]

    async def _framed(self, _subject: str, payload: bytes) -> None:
        frame = TokenFrame.model_validate_json(payload)
        self.first_ns.setdefault(frame.request, time.time_ns())
        if frame.finish is not None:
            self._finished[frame.request].set()

    async def commit(self) -> None:
        """Every node serves eight workers of one rank."""
        await self._complete.wait()
        sealer = self.runtime.sealer("bench")
        for node in NODES:
            adopt = Adopt(term=1, node=node, incarnation=1, epoch=1, composition=(1,) * RANKS)
            await self.runtime.bus.request(self.runtime.subjects.agent(node), encode_message(adopt), 5.0)
            workers = tuple(
                CommittedWorker(worker=worker_id(node, 1, rank), first_rank=rank, degree=1, capacity_us=1)
                for rank in range(RANKS)
            )
            committed = EpochCommitted(node=node, epoch=1, composition=(1,) * RANKS, workers=workers)
            await self.runtime.log.append([entry for _, entry in sealer.seal([committed], NO_ORIGIN)], {})

    async def serve(self, number: int, new_tokens: int) -> None:
        """One request, from the assignment to its last frame."""
        worker = WorkerId(f"{NODES[number % len(NODES)]}/1/{number // len(NODES) % RANKS}")
        request = RequestId(f"{new_tokens}-{number}-{len(self.sent_ns)}")
        self._finished[request] = asyncio.Event()
        assign = Assign(
            request=request,
            attempt=1,
            router=ROUTER,
            router_source=ROUTER,
            worker=worker,
            decode_worker=decode_worker_id(node_of(worker), 0),
            prompt_tokens=PROMPT_TOKENS,
            block_ids=self._chain,
            max_new_tokens=new_tokens,
            sampling=SamplingSpec(temperature=0.0),
            service_us=1_000,
        )
        self.sent_ns[request] = time.time_ns()
        subject = self.runtime.subjects.agent(node_of(worker))
        await self.runtime.bus.request(subject, encode_message(assign), 5.0)
        await self._finished[request].wait()

    async def serve_many(self, requests: int, at_a_time: int, new_tokens: int) -> None:
        slots = asyncio.Semaphore(at_a_time)

        async def one(number: int) -> None:
            async with slots:
                await self.serve(number, new_tokens)

        await asyncio.gather(*(one(number) for number in range(requests)))

    def milliseconds(self, to_ns: dict[RequestId, int], first: int) -> str:
        """p50 and p99 from the assignment on, of the requests after the first `first`."""
        waits = [(to_ns[each] - sent) / 1e6 for each, sent in list(self.sent_ns.items())[first:] if each in to_ns]
        cuts = quantiles(waits, n=100)
        return f"p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms (n={len(waits)})"


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(nats_url: str, pid: int) -> None:
    async with open_runtime(ServiceSettings(nats_url=nats_url, log_level="warning"), "bench") as runtime:
        bench = Bench(runtime)
        await bench.start()
        await bench.commit()
        await bench.serve_many(200, 8, 1)
        before = cpu_s(pid)
        await asyncio.sleep(IDLE_S)
        print(f"idle: {(cpu_s(pid) - before) / IDLE_S:.1%} of a core, {rss_mib(pid):.0f} MiB, {len(NODES)} nodes")

        first = len(bench.sent_ns)
        await bench.serve_many(500, 1, 1)
        await asyncio.sleep(0.5)
        print(f"one at a time: assign to prefill-started {bench.milliseconds(bench.started_ns, first)}")
        print(f"one at a time: assign to first token     {bench.milliseconds(bench.first_ns, first)}")

        for new_tokens in (1, 64):
            before, began = cpu_s(pid), time.monotonic()
            await bench.serve_many(3_000, 32, new_tokens)
            spent, took = cpu_s(pid) - before, time.monotonic() - began
            print(
                f"32 at a time, {new_tokens} tokens: {spent / 3_000 * 1e6:.0f} us CPU per request, {3_000 / took:.0f}/s"
            )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, EmbeddedNats(Path(directory) / "nats", sync_always=False) as nats:
        settings = {
            "VERTUMNUS_NATS_URL": nats.url,
            "VERTUMNUS_ENGINE": "modelled",
            "VERTUMNUS_NODES": str(len(NODES)),
            "VERTUMNUS_SPEEDUP": "1000",
            "VERTUMNUS_LOG_LEVEL": "warning",
        }
        worker = subprocess.Popen([sys.executable, "-m", "services.worker"], env={**os.environ, **settings})
        try:
            asyncio.run(measure(nats.url, worker.pid))
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    main()
