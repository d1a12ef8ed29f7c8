"""`python -m services.controller`: connect, fold, seek the lease, decide."""

from contextlib import closing

from fastapi import FastAPI

from services.controller.forecaster import ProcessScorer
from services.controller.hosting import host
from services.controller.operator import operator_api
from services.controller.settings import ControllerSettings
from shared.runtime.service import open_runtime, probes, run, serve


async def main() -> None:
    settings = ControllerSettings()
    with closing(ProcessScorer()) as scorer:
        async with open_runtime(settings, "controller") as runtime:
            hosted = await host(settings, runtime, scorer)
            app = FastAPI(title="Vertumnus controller")
            app.include_router(probes(hosted.controller.ready, runtime.metrics))
            app.include_router(operator_api(hosted.state, hosted.leadership, settings.operator_key()))
            await serve(app, settings, hosted.failures, hosted.controller.stop)


if __name__ == "__main__":
    run(main)
