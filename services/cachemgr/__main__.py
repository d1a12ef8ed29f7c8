"""`python -m services.cachemgr`: connect, fold, seek the lease, scan."""

from fastapi import FastAPI

from services.cachemgr.hosting import host
from services.cachemgr.prefixes import prefixes_api
from services.cachemgr.settings import CacheManagerSettings
from shared.runtime.service import open_runtime, probes, run, serve


async def main() -> None:
    settings = CacheManagerSettings()
    async with open_runtime(settings, "cachemgr") as runtime:
        hosted = await host(settings, runtime)
        app = FastAPI(title="Vertumnus cache manager")
        app.include_router(probes(hosted.manager.ready, runtime.metrics))
        app.include_router(prefixes_api(hosted.state))
        await serve(app, settings, hosted.failures, hosted.stop)


if __name__ == "__main__":
    run(main)
