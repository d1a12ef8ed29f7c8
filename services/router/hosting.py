"""A router without its HTTP side: what it folds, records and drives."""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple

import structlog

from services.router import decider, loops
from services.router.decider import State
from services.router.dispatch import Dispatcher
from services.router.doubts import end_doubts
from services.router.metrics import RouterMetrics
from services.router.settings import RouterSettings
from shared.model.compiled import kept_in
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime
from shared.runtime.telemetry import watch_log


class Hosted(NamedTuple):
    """A router at work. The first of `failures` that returns says why the process must end."""

    state: State
    projection: Projection[State]
    outbox: Outbox
    dispatcher: Dispatcher
    metrics: RouterMetrics
    failures: Sequence[Awaitable[Exception]]


async def host(settings: RouterSettings, runtime: Runtime) -> Hosted:
    """Fold the log, be known and alive, take requests. Errors: those of `Projection.start`."""
    structlog.get_logger(component="router").info("decisions are compiled", kept_in=kept_in(loops.costs))
    state = decider.initial(settings.cost_model())
    filters = [runtime.subjects.channel(each) for each in decider.HEARD]
    projection = Projection(runtime.log, filters, state, decider.evolve, runtime.keepsake)
    await projection.start()
    outbox = Outbox(projection, runtime.sealer(runtime.source), runtime.clock)
    await outbox.start()
    metrics = RouterMetrics(runtime.metrics)
    watch_log(runtime.metrics, runtime.clock, projection, outbox)
    dispatcher = Dispatcher(runtime, settings, projection, outbox, metrics)
    await dispatcher.start()
    failed = [each.failed() for each in (projection, outbox, dispatcher)]
    return Hosted(state, projection, outbox, dispatcher, metrics, [*failed, end_doubts(state, runtime)])
