"""`python -m services.controller`: connect, fold, seek the lease, decide."""

from fastapi import FastAPI

from services.controller import decider
from services.controller.epochs import Configured
from services.controller.keeper import Keeper
from services.controller.metrics import Metrics
from services.controller.operator import operator_api
from services.controller.settings import ControllerSettings
from services.controller.shell import Controller, Epochs
from shared.contracts.envelope import Channel
from shared.model.capacity import load_capacities
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.projection import Projection
from shared.runtime.service import open_runtime, probes, run, serve
from shared.runtime.telemetry import watch_log


async def main() -> None:
    settings = ControllerSettings()
    async with open_runtime(settings, "controller") as runtime:
        subjects, clock, state = runtime.subjects, runtime.clock, decider.initial()
        heard = [subjects.control, subjects.cache_control, *map(subjects.channel, (Channel.WORKERS, Channel.REQUESTS))]
        projection = Projection(runtime.log, heard, state, decider.evolve, runtime.keepsake)
        leadership = Leadership(
            runtime.lease("controller"),
            projection,
            Fence(projection, runtime.sealer(runtime.source), subjects.control, clock),
            lambda lease_term: decider.take_leadership(
                state, runtime.source, lease_term, projection.first_seq, projection.kept_events
            ),
            clock,
        )
        configured = Configured(settings.composition, settings.compositions)
        first_epochs = Epochs(configured, settings.capacity_share, load_capacities(settings.coefficients))
        metrics = Metrics(runtime.metrics)
        controller = Controller(state, leadership, runtime.bus, subjects, clock, first_epochs, metrics)
        watch_log(runtime.metrics, clock, projection)
        projection.listen(controller.folded)
        await projection.start()
        await leadership.start()
        await controller.start()
        app = FastAPI(title="Vertumnus controller")
        app.include_router(probes(controller.ready, runtime.metrics))
        app.include_router(operator_api(state, leadership, settings.operator_key()))
        keeper = Keeper(state.keepsake, leadership, runtime.keepsake, runtime.log.identity, clock)
        failures = [projection.failed(), leadership.failed(), controller.failed(), keeper.run()]
        await serve(app, settings, failures, controller.stop)


if __name__ == "__main__":
    run(main)
