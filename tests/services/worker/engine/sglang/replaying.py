"""A local server that repeats what a real one answered and published (`recordings`). It computes nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import zmq
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from services.worker.engine.sglang.server import NOBODY
from tests.services.worker.engine.sglang.recordings import recorded


class Replay:
    """`asked` are the bodies that came, `aborted` the requests that were to end, `probed` whether it was well at each probe.
    `broken_after` cuts streams off after so many parts, as a server does that dies; one that is `full` takes no request, one
    that is `hanging` takes it and says nothing more. `boot` is added to the start-up times, so that another number is another
    life. `events_host` is where it says that it publishes, `mode` what it says to be, `told` what else."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.probed: list[bool] = []
        self.broken_after: int | None = None
        self.well = True
        self.full = False
        self.hanging = False
        self.events_host = "*"
        self.boot = 0.0
        self.mode = "null"
        self.told: dict[str, Any] = {}
        self.buffer: list[list[bytes]] = []
        self.replays: list[int] = []
        self.url = ""
        context = zmq.asyncio.Context.instance()
        self._events, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._events, self._replay)]

    # --- HTTP

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/model_info")(self._model_info)
        app.get("/server_info")(self._server_info)
        app.post("/generate")(self._generate)
        app.post("/abort_request")(self._abort)
        return app

    async def _model_info(self) -> Response:
        self.probed.append(self.well)
        return JSONResponse(recorded()["model_info"]) if self.well else Response(status_code=503)

    async def _server_info(self) -> Response:
        told = recorded()["server_info"] | self.told
        events = {
            "endpoint_host": self.events_host,
            "endpoint_port_base": self._ports[0],
            "replay_endpoint_port_base": self._ports[1],
        }
        published = {key: value for key, value in told["kv_events"].items() if not key.startswith("load")}
        times = {**told["startup_time"], "scheduler_e2e": told["startup_time"]["scheduler_e2e"] + self.boot}
        return JSONResponse(
            {**told, "startup_time": times, "kv_events": {**published, **events}, "disaggregation_mode": self.mode}
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.hanging:
            await asyncio.Event().wait()
        if self.full:
            return JSONResponse({"object": "error", "message": "The request queue is full."}, status_code=503)
        if len(body["input_ids"]) > 4_096:
            return JSONResponse(recorded()["too-long"]["answer"], status_code=400)
        if body["stream"]:
            return StreamingResponse(self._lines(), media_type="text/event-stream")
        seen = sum(each["input_ids"] == body["input_ids"] for each in self.asked)
        return JSONResponse(recorded()["cold" if seen == 1 else "warm"]["answer"])

    async def _lines(self) -> AsyncIterator[str]:
        lines: Sequence[str] = recorded()["stream"]["lines"]
        for line in lines[: self.broken_after]:
            yield f"{line}\n\n"
            await asyncio.sleep(0)
        if self.broken_after is not None:
            raise ConnectionResetError("the server dies")

    async def _abort(self, request: Request) -> None:
        if (rid := (await request.json())["rid"]) != NOBODY:
            self.aborted.append(rid)

    # --- events

    async def publish(self, frames: list[bytes], sequence: int, *, lost: bool = False, forgotten: bool = False) -> None:
        """One message under another number. One that is `lost` can be had by a replay, unless it is `forgotten`."""
        numbered = [frames[0], sequence.to_bytes(8, "big"), frames[2]]
        if not forgotten:
            self.buffer.append(numbered)
        if not lost:
            await self._events.send_multipart(numbered)

    async def serve_replays(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            for frames in self.buffer:
                if frames[1] >= first:
                    await self._replay.send_multipart([client, b"", *frames])
            await self._replay.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        for socket in (self._events, self._replay):
            socket.close(linger=0)


@asynccontextmanager
async def replaying() -> AsyncIterator[Replay]:
    """A server on a free port."""
    replay = Replay()
    config = uvicorn.Config(replay.app(), host="127.0.0.1", port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    replays = asyncio.create_task(replay.serve_replays())
    for _ in range(6_000):
        if server.started:
            break
        await asyncio.sleep(0.01)
    replay.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield replay
    finally:
        server.should_exit = server.force_exit = True
        replays.cancel()
        await asyncio.gather(serving, replays, return_exceptions=True)
        replay.close()


def whole_stream() -> list[int]:
    """The tokens of the recorded stream."""
    found: list[int] = json.loads(recorded()["stream"]["lines"][-2].removeprefix("data: "))["output_ids"]
    return found
