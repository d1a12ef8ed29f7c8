"""Every service's fold and its decisions, for logs that begin anywhere."""

from collections.abc import Callable, Sequence

from services.cachemgr import decider as cachemgr
from services.controller import decider as controller
from services.controller import epochs
from services.ledger import readmodels
from services.ledger.patches import Place
from services.ledger.records import Arrival, record
from services.router import decider as router
from services.worker import decider as worker
from shared.contracts.codec import encode
from shared.contracts.envelope import Stored
from shared.contracts.ids import NodeId
from shared.model.cost import load_coefficients
from shared.model.holders import in_doubt


def every_service_folds_every_end_of(events: Sequence[Stored]) -> None:
    """Wherever a log begins, each service folds it and decides on it: what is missing is missed by nobody's code."""
    for begin in range(len(events)):
        for start in (a_router, a_controller, a_cache_manager, an_agent, a_ledger):
            fold, decide = start()
            for stored in events[begin:]:
                fold(stored)
            decide()


Fold = Callable[[Stored], None]
Service = tuple[Fold, Callable[[], object]]


def a_router() -> Service:
    state = router.initial(load_coefficients("qwen3_30b_a3b_h20"))

    def decide() -> None:
        state.loads.check()
        state.holders.check()
        in_doubt(state.holders, state.pool.alive)

    return lambda stored: router.evolve(state, stored), decide


def a_controller() -> Service:
    state = controller.initial()

    def decide() -> None:
        controller.close_window(state, 2**62)
        controller.lose_nodes(state, dict.fromkeys(controller.living_nodes(state), 1))
        epochs.wanted(state, epochs.Configured((1, 1, 2, 4), {}), {})

    return lambda stored: controller.evolve(state, stored), decide


def a_cache_manager() -> Service:
    state = cachemgr.initial(load_coefficients("qwen3_30b_a3b_h20"))

    def decide() -> None:
        state.trie.check(state.holders)
        cachemgr.scan(state)
        cachemgr.reconcile_placements(state)

    return lambda stored: cachemgr.evolve(state, stored), decide


def an_agent() -> Service:
    """Hears the control subject and what its own node says of itself."""
    state = worker.initial(NodeId("n0"), 1)

    def fold(stored: Stored) -> None:
        channel = stored.data.CHANNEL
        if channel == "control" or (channel == "workers" and "-n0" in stored.event.source):
            worker.evolve(state, stored)

    return fold, state.desk.check


def a_ledger() -> Service:
    models = readmodels.ReadModels()

    def fold(stored: Stored) -> None:
        place = Place(1, stored.stream_seq)
        readmodels.evolve(models, stored.log, place, record(Arrival(stored.stream_seq, encode(stored.event))))

    def decide() -> None:
        assert "unfolded" not in models.changes.patches, models.changes.patches["unfolded"]
        models.check()

    return fold, decide
