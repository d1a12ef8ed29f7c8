"""A cache manager without its HTTP side: what it folds and decides."""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple

from services.cachemgr import decider
from services.cachemgr.decider import State
from services.cachemgr.metrics import Metrics
from services.cachemgr.settings import CacheManagerSettings
from services.cachemgr.shell import CacheManager
from shared.contracts.envelope import Channel, EventData
from shared.model.cost import load_coefficients
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime
from shared.runtime.telemetry import watch_log


class Hosted(NamedTuple):
    """A cache manager at work, leader or standby. The first of `failures` that returns says why the process must end."""

    state: State
    leadership: Leadership
    manager: CacheManager
    failures: Sequence[Awaitable[Exception]]


async def host(settings: CacheManagerSettings, runtime: Runtime) -> Hosted:
    """Fold the log, seek the lease, decide while it is held. Errors: those of `Projection.start`."""
    subjects, clock = runtime.subjects, runtime.clock
    coefficients = load_coefficients(settings.coefficients)
    state = decider.initial(coefficients)
    channels = (Channel.WORKERS, Channel.CACHE, Channel.REQUESTS)
    heard = [subjects.control, subjects.cache_control, *map(subjects.channel, channels)]
    projection = Projection(runtime.log, heard, state, decider.evolve, runtime.keepsake)

    def announce(lease_term: int) -> list[EventData]:
        began = decider.Began(projection.first_seq, projection.kept_events, coefficients)
        return [decider.take_leadership(state, runtime.source, lease_term, began)]

    leadership = Leadership(
        runtime.lease("cachemgr"),
        projection,
        Fence(projection, runtime.sealer(runtime.source), subjects.cache_control, clock),
        announce,
        clock,
    )
    manager = CacheManager(state, leadership, runtime.bus, subjects, clock, Metrics(runtime.metrics))
    watch_log(runtime.metrics, clock, projection)
    projection.listen(manager.folded)
    await projection.start()
    await leadership.start()
    await manager.start()
    return Hosted(state, leadership, manager, [projection.failed(), leadership.failed(), manager.failed()])
