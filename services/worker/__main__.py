"""`python -m services.worker`: the agents of this process's nodes, until SIGTERM."""

import asyncio
import sys

from fastapi import FastAPI

from services.worker.engine.protocol import EngineError
from services.worker.engines import engines, settled
from services.worker.hosting import host
from services.worker.settings import WorkerSettings
from shared.runtime.clock import SystemClock
from shared.runtime.service import open_runtime, probes, run, serve


async def main() -> None:
    try:
        await _work(settled(WorkerSettings()))
    except EngineError as error:  # a model or a device that no engine can be made for
        sys.exit(f"the engine cannot be made: {error}")


async def _work(settings: WorkerSettings) -> None:
    with engines(settings, SystemClock()) as make_engine:
        async with open_runtime(settings, "worker") as runtime:
            agents = host(settings, runtime, make_engine)

            def ready() -> str | None:
                return next((reason for agent in agents if (reason := agent.ready())), None)

            async def stop() -> None:
                await asyncio.gather(*(agent.stop(settings.stop_s_max) for agent in agents))

            app = FastAPI(title="Vertumnus worker", docs_url=None, redoc_url=None, openapi_url=None)
            app.include_router(probes(ready, runtime.metrics))
            await asyncio.gather(*(agent.start() for agent in agents))
            await serve(app, settings, [agent.failed() for agent in agents], stop)


if __name__ == "__main__":
    run(main)
