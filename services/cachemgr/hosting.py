"""A cache manager without its HTTP side: what it folds and decides."""

from collections.abc import Awaitable, Sequence
from typing import NamedTuple

import structlog

from services.cachemgr import decider
from services.cachemgr.decider import State
from services.cachemgr.keeper import ROLE, Keeper, Kept, resume
from services.cachemgr.metrics import Metrics
from services.cachemgr.settings import CacheManagerSettings
from services.cachemgr.shell import CacheManager
from shared.contracts.envelope import Channel, EventData
from shared.model.cost import load_coefficients
from shared.runtime.background import Background
from shared.runtime.fence import Fence
from shared.runtime.leadership import Leadership
from shared.runtime.process_copy import Elsewhere, ProcessCopy
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime
from shared.runtime.snapshots import Snapshots
from shared.runtime.telemetry import watch_log


class Hosted(NamedTuple):
    """A cache manager at work, leader or standby. The first of `failures` that returns says why the process must end."""

    state: State
    leadership: Leadership
    manager: CacheManager
    keeping: Background
    failures: Sequence[Awaitable[Exception]]

    async def stop(self) -> None:
        """Decide and keep nothing more."""
        await self.keeping.stop()
        await self.manager.stop()


async def host(settings: CacheManagerSettings, runtime: Runtime, elsewhere: Elsewhere = ProcessCopy) -> Hosted:
    """Go on from what was kept or fold the log, seek the lease, decide while it is held. `elsewhere` is where snapshots are
    made. Errors: those of `Projection.start`."""
    subjects, clock = runtime.subjects, runtime.clock
    coefficients = load_coefficients(settings.coefficients)
    kept = Kept(Snapshots(runtime.snapshots, ROLE), runtime.log, coefficients)
    folded = await resume(kept)
    state = folded.state if folded is not None else decider.initial(coefficients)
    channels = (Channel.WORKERS, Channel.CACHE, Channel.REQUESTS)
    heard = [subjects.control, subjects.cache_control, *map(subjects.channel, channels)]
    projection = Projection(runtime.log, heard, state, decider.evolve, runtime.keepsake)
    if folded is not None:
        projection.resume(folded.reached)

    def announce(lease_term: int) -> list[EventData]:
        began = decider.Began(projection.first_seq, projection.kept_events, coefficients)
        return [decider.take_leadership(state, runtime.source, lease_term, began)]

    leadership = Leadership(
        runtime.lease(ROLE),
        projection,
        Fence(projection, runtime.sealer(runtime.source), subjects.cache_control, clock),
        announce,
        clock,
    )
    metrics = Metrics(runtime.metrics)
    manager = CacheManager(state, leadership, runtime.bus, subjects, clock, metrics)
    watch_log(runtime.metrics, clock, projection)
    projection.listen(manager.folded)
    resumed_seq = projection.seen_seq
    await projection.start()
    metrics.show_start(resumed_seq, projection.folded_events)
    structlog.get_logger(component="cachemgr").info(
        "folded", resumed_seq=resumed_seq, events=projection.folded_events, seen_seq=projection.seen_seq
    )
    await leadership.start()
    await manager.start()
    keeping = Background("keeper")
    keeping.start(Keeper(kept, projection, leadership, elsewhere, clock, metrics).run(settings.snapshot_every_s))
    failures = [projection.failed(), leadership.failed(), manager.failed(), keeping.failed()]
    return Hosted(state, leadership, manager, keeping, failures)
