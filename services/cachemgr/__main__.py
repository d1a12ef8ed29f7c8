"""`python -m services.cachemgr`: connect, fold, seek the lease, scan."""

from fastapi import FastAPI

from services.cachemgr import decider
from services.cachemgr.metrics import Metrics
from services.cachemgr.prefixes import prefixes_api
from services.cachemgr.settings import CacheManagerSettings
from services.cachemgr.shell import CacheManager
from shared.contracts.envelope import Channel
from shared.model.cost import load_coefficients
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.projection import Projection
from shared.runtime.service import open_runtime, probes, run, serve
from shared.runtime.telemetry import watch_log


async def main() -> None:
    settings = CacheManagerSettings()
    async with open_runtime(settings, "cachemgr") as runtime:
        subjects, clock = runtime.subjects, runtime.clock
        coefficients = load_coefficients(settings.coefficients)
        state = decider.initial(coefficients)
        channels = (Channel.WORKERS, Channel.CACHE, Channel.REQUESTS)
        heard = [subjects.control, subjects.cache_control, *map(subjects.channel, channels)]
        projection = Projection(runtime.log, heard, state, decider.evolve, runtime.keepsake)
        leadership = Leadership(
            runtime.lease("cachemgr"),
            projection,
            Fence(projection, runtime.sealer(runtime.source), subjects.cache_control, clock),
            lambda lease_term: decider.take_leadership(
                state,
                runtime.source,
                lease_term,
                decider.Began(projection.first_seq, projection.kept_events, coefficients),
            ),
            clock,
        )
        manager = CacheManager(state, leadership, runtime.bus, subjects, clock, Metrics(runtime.metrics))
        watch_log(runtime.metrics, clock, projection)
        projection.listen(manager.folded)
        await projection.start()
        await leadership.start()
        await manager.start()
        app = FastAPI(title="Vertumnus cache manager")
        app.include_router(probes(manager.ready, runtime.metrics))
        app.include_router(prefixes_api(state))
        await serve(app, settings, [projection.failed(), leadership.failed(), manager.failed()], manager.stop)


if __name__ == "__main__":
    run(main)
