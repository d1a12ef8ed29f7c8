"""A controller without its HTTP side: what it folds, decides and keeps."""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from services.controller import decider
from services.controller.decider import State
from services.controller.epochs import Configured
from services.controller.forecaster import Forecasts, Scorer
from services.controller.keeper import Keeper
from services.controller.metrics import Metrics
from services.controller.opening import opening
from services.controller.settings import ControllerSettings
from services.controller.shell import Controller, Epochs
from shared.contracts.envelope import Channel, EventData
from shared.model.capacity import load_capacities
from shared.model.cost import load_coefficients
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime
from shared.runtime.telemetry import watch_log


class Hosted(NamedTuple):
    """A controller at work, leader or standby. The first of `failures` that returns says why the process must end."""

    state: State
    leadership: Leadership
    controller: Controller
    failures: Sequence[Awaitable[Exception]]


async def host(settings: ControllerSettings, runtime: Runtime, scorer: Scorer) -> Hosted:
    """Fold the log, seek the lease, decide while it is held; `scorer` answers forecasts. Errors: as `Projection.start`."""
    subjects, clock, state = runtime.subjects, runtime.clock, decider.initial()
    heard = [subjects.control, subjects.cache_control, *map(subjects.channel, (Channel.WORKERS, Channel.REQUESTS))]
    projection = Projection(runtime.log, heard, state, decider.evolve, runtime.keepsake)

    def announce(lease_term: int) -> list[EventData]:
        began = projection.first_seq, projection.kept_events
        return [decider.take_leadership(state, runtime.source, lease_term, *began), *opening(state, *began)]

    leadership = Leadership(
        runtime.lease("controller"),
        projection,
        Fence(projection, runtime.sealer(runtime.source), subjects.control, clock),
        announce,
        clock,
    )
    configured = Configured(settings.composition, settings.compositions)
    first_epochs = Epochs(configured, settings.capacity_share, load_capacities(settings.coefficients))
    metrics = Metrics(runtime.metrics)
    forecasts = Forecasts(scorer, load_coefficients(settings.coefficients))
    controller = Controller(state, leadership, runtime.bus, subjects, clock, first_epochs, metrics, forecasts)
    watch_log(runtime.metrics, clock, projection)
    projection.listen(controller.folded)
    await projection.start()
    await leadership.start()
    await controller.start()
    keeper = Keeper(state.keepsake, leadership, runtime.keepsake, runtime.log.identity, clock)
    failures = [projection.failed(), leadership.failed(), controller.failed(), keeper.run()]
    return Hosted(state, leadership, controller, failures)
