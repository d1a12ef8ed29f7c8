"""Decisions about a node's geometry: which drains and epochs it follows, and what it says of them. Pure."""

from services.worker.decider import Geometry, State
from services.worker.engine.protocol import RankAdopted
from shared.contracts.commands import Adopt, Drain, Refused
from shared.contracts.envelope import EventData
from shared.contracts.events import DrainCompleted, RankAdoptedEpoch
from shared.contracts.ids import WorkerId
from shared.model.cost import US_PER_S
from shared.model.lattice import groups_of


def refuse_drain(state: State, command: Drain) -> Refused | None:
    """Why this drain is not carried out."""
    if command.term < state.term:
        return _stale_term(state, command.term)
    unknown = [worker for worker in command.workers if worker not in state.desk.workers]
    if unknown:
        return Refused(reason="unknown-worker", detail=f"{unknown} are none of {list(state.desk.workers)}")
    return None


def refuse_adopt(state: State, command: Adopt, prefill_ranks: int) -> Refused | None:
    """Why this geometry is not adopted. What is served may be asked for again; what is committed may be too, if the node
    booted something older. Anything else needs a number that was never served: the way back from an aborted
    reconfiguration is the old composition under a new number."""
    if command.term < state.term:
        return _stale_term(state, command.term)
    if command.node != state.node:
        return Refused(reason="bad-command", detail=f"node: {command.node!r} is not {state.node!r}")
    if command.incarnation != state.incarnation:
        return Refused(reason="stale-epoch", detail=f"incarnation: {command.incarnation} is not {state.incarnation}")
    try:
        groups_of(command.composition)
    except ValueError as error:
        return Refused(reason="bad-command", detail=str(error))
    if sum(command.composition) != prefill_ranks:
        detail = f"composition: {command.composition} covers {sum(command.composition)} of {prefill_ranks} ranks"
        return Refused(reason="bad-command", detail=detail)
    wanted = Geometry(command.epoch, command.composition)
    if wanted == state.served:
        return None
    if wanted.epoch <= state.served.epoch or wanted.epoch < state.committed.epoch:
        newest = max(state.served.epoch, state.committed.epoch)
        return Refused(reason="stale-epoch", detail=f"epoch: {wanted.epoch} is not above {newest}")
    if wanted.epoch == state.committed.epoch and wanted != state.committed:
        detail = f"composition: epoch {wanted.epoch} was committed as {state.committed.composition}"
        return Refused(reason="bad-command", detail=detail)
    return None


def _stale_term(state: State, term: int) -> Refused:
    return Refused(reason="stale-term", detail=f"term: {term} is below {state.term}")


def adopted(state: State, ranks: tuple[RankAdopted, ...]) -> list[EventData]:
    """Every rank serves the geometry that `serve` has set."""
    return [
        RankAdoptedEpoch(
            node=state.node,
            incarnation=state.incarnation,
            rank=each.rank,
            epoch=state.served.epoch,
            switch_us=round(each.seconds * US_PER_S),
        )
        for each in ranks
    ]


def retired(state: State, prefill_ranks: int) -> list[EventData]:
    """The node shuts down: its ranks serve no epoch any more, so nobody places on it while it finishes what it has."""
    if not state.served.epoch:
        return []
    return [
        RankAdoptedEpoch(node=state.node, incarnation=state.incarnation, rank=rank, epoch=0, switch_us=0)
        for rank in range(prefill_ranks)
    ]


def drained(state: State, workers: tuple[WorkerId, ...], returned_requests: int, drain_us: int) -> list[EventData]:
    """No step runs and nothing is queued at these workers; [] if the drain has been called off."""
    if not all(state.desk.is_draining(worker) for worker in workers):
        return []
    return [
        DrainCompleted(
            node=state.node,
            node_epoch=state.served.epoch,
            workers=workers,
            returned_requests=returned_requests,
            drain_us=drain_us,
        )
    ]
