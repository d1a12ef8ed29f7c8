"""`python -m tests.runtime.program`: a service like any other, for the tests of what all services share.

It records one event, leads if it can, and serves. `GET /record?n=` records more, `GET /sleep?s=` is a slow client's request.
"""

import asyncio
from itertools import count

import structlog
from fastapi import FastAPI
from pydantic import Field

from shared.contracts.events import RouterRegistered
from shared.contracts.ids import RouterId
from shared.runtime.lease import RENEW_EVERY_S
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime, open_runtime, probes, run, serve
from shared.runtime.settings import ServiceSettings
from shared.runtime.telemetry import watch_log


class ProgramSettings(ServiceSettings):
    stop_s: float = Field(default=0.0, description="how long on_stop takes")


async def lead(runtime: Runtime, state: dict[str, int | None]) -> None:
    lease = runtime.lease("program")
    while True:
        state["term"] = await lease.acquire()
        await runtime.clock.sleep(RENEW_EVERY_S)


async def main() -> None:
    settings = ProgramSettings()
    async with open_runtime(settings, "program") as runtime:
        projection: Projection[list[object]] = Projection(
            runtime.log, [runtime.subjects.all_events], [], lambda state, stored: state.append(stored)
        )
        await projection.start()
        outbox = Outbox(projection, runtime.sealer(runtime.source), runtime.clock)
        await outbox.start()
        watch_log(runtime.metrics, runtime.clock, projection, outbox)
        numbers = count(1)
        state: dict[str, int | None] = {"term": None}
        leading = asyncio.create_task(lead(runtime, state))
        app = FastAPI()
        app.include_router(probes(lambda: None if outbox.ready else "the log does not take events", runtime.metrics))

        @app.get("/record")
        async def record(n: int = 1) -> int:
            outbox.record([RouterRegistered(router=RouterId(f"r{next(numbers)}")) for _ in range(n)])
            return outbox.events

        @app.get("/term")
        async def term() -> int | None:
            return state["term"]

        @app.get("/sleep")
        async def sleep(s: float) -> str:
            await asyncio.sleep(s)
            return "woken"

        async def stop() -> None:
            structlog.get_logger().info("stopping")
            await runtime.clock.sleep(settings.stop_s)
            leading.cancel()
            await outbox.stop()
            await projection.stop()

        await serve(app, settings, [projection.failed(), outbox.failed()], stop)


if __name__ == "__main__":
    run(main)
