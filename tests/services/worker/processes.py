"""Worker processes on a real NATS server, and the little of a controller and a router that they need to meet."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cli.embedded.loopback import free_port
from shared.contracts.codec import decode
from shared.contracts.commands import (
    Adopt,
    Claim,
    Reply,
    TokenFrame,
    decode_reply,
    encode_message,
)
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import NodeRegistered
from shared.contracts.ids import NodeId, RequestId, RouterId
from shared.contracts.message import (
    Message,
)
from shared.model.blocks import Tokens
from shared.model.lattice import Composition
from shared.runtime.appending import NO_ORIGIN
from shared.runtime.ports import NoReply
from shared.runtime.service import Runtime, open_runtime
from shared.runtime.settings import ServiceSettings
from tests.services.worker.scripted import ROUTER, committed

WAIT_S = 60.0
POOL = "test"


class WorkerProcess:
    """`python -m services.worker` with the modelled engine."""

    def __init__(self, nats_url: str, log: Path, env: Mapping[str, str]) -> None:
        self.port = free_port()
        self.log = log
        self._started_with = nats_url, log, env
        own = {
            "VERTUMNUS_NATS_URL": nats_url,
            "VERTUMNUS_POOL": POOL,
            "VERTUMNUS_ENGINE": "modelled",
            "VERTUMNUS_HTTP_PORT": str(self.port),
            **env,
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.worker"], env={**os.environ, **own}, stdout=out, stderr=out
            )

    def again(self) -> "WorkerProcess":
        """Another, as this one was."""
        return WorkerProcess(*self._started_with)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def end(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}")


@dataclass
class Others:
    """The rest of the pool: everything on the log in `stored`, the frames a router got in `frames`."""

    runtime: Runtime
    router: RouterId = ROUTER
    stored: list[Stored] = field(default_factory=list)
    frames: list[TokenFrame] = field(default_factory=list)
    prompts: dict[RequestId, Tokens] = field(default_factory=dict)

    async def listen(self) -> None:
        def deliver(_subject: str, seq: int, raw: bytes) -> None:
            self.stored.append(Stored("log", seq, decode(raw)))

        subjects = self.runtime.subjects
        await self.runtime.log.tail([subjects.all_events], 0, deliver)
        await self.runtime.bulk.subscribe(subjects.claim(self.router), self._claimed)
        await self.runtime.bulk.subscribe(subjects.all_frames(self.router), self._framed)
        self._sealer = self.runtime.sealer("controller")

    async def _claimed(self, _subject: str, payload: bytes) -> bytes:
        claim = Claim.model_validate_json(payload)
        return self.prompts[claim.request][claim.offset : claim.offset + 65_536].astype("<u4").tobytes()

    async def _framed(self, _subject: str, payload: bytes) -> None:
        self.frames.append(TokenFrame.model_validate_json(payload))

    def events(self, *kinds: type[EventData]) -> list[EventData]:
        return [each.data for each in self.stored if isinstance(each.data, kinds)]

    async def ask(self, node: NodeId, command: Message) -> Reply:
        """Asks again when there is no answer, as every sender of commands does: all of them may be repeated."""
        subject = self.runtime.subjects.agent(node)
        for _ in range(int(WAIT_S)):
            try:
                return decode_reply(await self.runtime.bus.request(subject, encode_message(command), 1.0))
            except NoReply:
                await asyncio.sleep(0.1)
        raise AssertionError(f"no answer on {subject} within {WAIT_S:g} s")

    async def registered(self, node: NodeId, incarnation: int) -> NodeRegistered:
        """Once it is on the log."""

        def found() -> list[NodeRegistered]:
            return [
                each
                for each in self.events(NodeRegistered)
                if isinstance(each, NodeRegistered) and (each.node, each.incarnation) == (node, incarnation)
            ]

        await until(lambda: bool(found()), f"{node} registers incarnation {incarnation}")
        return found()[0]

    async def commit(self, node: NodeId, incarnation: int, epoch: int, composition: Composition) -> None:
        """Order the composition, and commit it when it was adopted."""
        order = Adopt(term=1, node=node, incarnation=incarnation, epoch=epoch, composition=composition)
        while (reply := await self.ask(node, order)).kind != "accepted":
            assert reply.kind == "refused"
            assert reply.reason == "busy", reply
            await asyncio.sleep(0.05)
        await self.tell(committed(epoch, composition, node))

    async def tell(self, *facts: EventData) -> None:
        """Append what a controller or a router says."""
        await self.runtime.log.append([entry for _, entry in self._sealer.seal(facts, NO_ORIGIN)], {})


@asynccontextmanager
async def others(nats_url: str) -> AsyncIterator[Others]:
    async with open_runtime(ServiceSettings(nats_url=nats_url, pool=POOL), "controller") as runtime:
        pool = Others(runtime)
        await pool.listen()
        yield pool


async def until(holds: Callable[[], bool], what: str) -> None:
    """Fails with `what` when it does not hold in time."""
    for _ in range(int(WAIT_S / 0.02)):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {WAIT_S:g} s: {what}")
