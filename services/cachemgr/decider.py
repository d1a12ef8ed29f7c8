"""The cache manager's decisions as pure functions of what it has folded.

Everything here goes to the one fenced subject `….cache-control`. The trie and its demand are folds of the log like the
rest, scans included: a scan is an event, and statistics decay when it is folded. Every decision is safe to repeat.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.cachemgr import choosing, demand, reclaiming, reclamation, regret, replication
from services.cachemgr.first_rules import FirstRules
from services.cachemgr.first_tips import FirstTips
from services.cachemgr.reclaiming import PresentRules
from services.cachemgr.reconciliation import Known, reconcile
from services.cachemgr.replication import Operations
from services.cachemgr.trie import Trie
from services.cachemgr.view import FIRST, PRESENT, View
from shared.contracts.copy_commands import Copy, Evict
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    SERVING,
    BlocksEvicted,
    BlocksStored,
    CacheLeadershipTaken,
    CacheReported,
    CacheScanCompleted,
    CalibrationUpdated,
    EpochAborted,
    EpochCommitted,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    PrefillCompleted,
    ReclamationRequested,
    ReconfigurationPlanned,
    ReplicationRequested,
    RequestAssigned,
    Thawed,
    Uncordoned,
)
from shared.contracts.ids import BlockId, NodeId
from shared.model import backlog as backlog_model
from shared.model import cost as cost_model
from shared.model import holders as holders_model
from shared.model import parameters as parameters_model
from shared.model import pool as pool_model
from shared.model.backlog import Backlog
from shared.model.cost import Coefficients
from shared.model.holders import Holders
from shared.model.parameters import Parameters
from shared.model.pool import Pool

CHANGES = frozenset(
    {
        BlocksStored, BlocksEvicted, CacheReported, NodeRegistered, NodeLost, NodeDeclaredLost, EpochCommitted,
        RequestAssigned, PrefillCompleted, ParametersChanged, EpochAborted, Uncordoned, Thawed,
    }
)  # fmt: skip
"""Events after which a scan may find something else."""

OWN_REASONS = {replication.DESTINATION_LOST, replication.TOO_LONG, reclamation.TOO_LONG}
"""Why operations fail by decision; any other reason is an agent's."""


@dataclass(slots=True)
class State:
    """What the log says, up to `seen_seq`. `trie` watches `holders`; `plans` are reconfigurations under way."""

    coefficients: Coefficients
    trie: Trie
    holders: Holders
    parameters: Parameters
    pool: Pool = field(default_factory=Pool)
    operations: Operations = field(default_factory=Operations)
    backlog: Backlog = field(default_factory=Backlog)
    plans: dict[NodeId, ReconfigurationPlanned] = field(default_factory=dict)
    term: int = 0
    seen_seq: int = 0
    changed_seq: int = 0
    scanned_seq: int = 0


class Began(NamedTuple):
    """What the fold of a process began with: the log's first event then, how many kept ones, and the cost model."""

    first_seq: int
    kept_events: int
    coefficients: Coefficients


def initial(coefficients: Coefficients, *, derives: bool = False) -> State:
    """Before the first event. `derives`: decisions of any version are to be made again, and not only those of today."""
    parameters = Parameters()
    trie = Trie(parameters, FirstTips() if derives else None)
    return State(coefficients, trie, Holders(watcher=trie), parameters)


def evolve(state: State, stored: Stored) -> None:
    """Fold one event. The trie learns the degrees of new workers before their holders, and forgets them after."""
    data = stored.data
    if isinstance(data, EpochCommitted):
        state.trie.degrees.update((each.worker, each.degree) for each in data.workers)
    holders_model.evolve(state.holders, stored)
    if type(data) not in SERVING:
        pool_model.evolve(state.pool, stored)
    replication.evolve(state.operations, stored, state.holders)
    backlog_model.evolve(state.backlog, stored)
    state.seen_seq = max(state.seen_seq, stored.stream_seq)
    if type(data) in CHANGES:
        state.changed_seq = state.seen_seq
    match data:
        case RequestAssigned():
            count = regret.count if state.parameters.cache_policy == "regret" else demand.count_missed
            count(state.trie, state.holders, state.pool, state.coefficients, data)
        case PrefillCompleted():
            demand.count_access(state.trie, state.holders, state.pool, data)
        case _ if type(data) in SERVING:
            pass
        case ReplicationRequested() if state.parameters.cache_policy == "regret":
            choosing.relieved(state.trie, BlockId(data.z), data.degree)
        case CacheScanCompleted():
            state.scanned_seq = data.to_seq
            state.trie.scanned(data.scan)
            state.trie.tips.passed(data.passed, spare=state.parameters.cache_policy != "paper")
        case ParametersChanged():
            state.parameters = parameters_model.evolve(state.parameters, stored)
            state.trie.retune(state.parameters)
        case CalibrationUpdated():
            state.coefficients = cost_model.evolve(state.coefficients, stored)
        case ReconfigurationPlanned():
            state.plans[data.node] = data
        case EpochAborted():
            state.plans.pop(data.node, None)
        case EpochCommitted():
            state.plans.pop(data.node, None)
            state.trie.degrees = {each: worker.degree for each, worker in state.pool.workers.items()}
        case CacheLeadershipTaken():
            state.term = data.term
        case _:
            state.parameters = parameters_model.evolve(state.parameters, stored)
    state.trie.trim()


def take_leadership(state: State, leader: str, lease_term: int, began: Began | None = None) -> CacheLeadershipTaken:
    """The first event of a term: above every term of the log, even if the lease has begun to count anew."""
    term = max(lease_term, state.term + 1)
    if began is None:
        return CacheLeadershipTaken(leader=leader, term=term)
    return CacheLeadershipTaken(
        leader=leader,
        term=term,
        first_seq=began.first_seq,
        kept_events=began.kept_events,
        coefficients=began.coefficients.model_dump(),
    )


def scan(state: State, rules: int = PRESENT) -> list[EventData]:
    """`cache-scan-completed`: how many candidates each list of Algorithm 2 has now, and the copies and reclamations chosen
    from them, which follow it.

    `rules` are those of the scan's version: of those before today's, `initial` has to know.

    A scan that would find a trie in which nothing has happened and no demand is left would say and change nothing; it is not
    recorded, or an idle pool would write 86,400 of them a day.
    """
    if state.changed_seq <= state.scanned_seq and not state.trie.warm:
        return []
    inter, intra, reclaimable = state.trie.candidates()
    number = state.trie.scan + 1
    view = View(
        state.trie,
        state.holders,
        state.pool,
        state.backlog,
        state.operations,
        state.parameters,
        state.coefficients,
        rules,
    )
    copies: list[ReplicationRequested] = []
    for wish in choosing.copies(view, number):
        copies += replication.request(state.operations, state.trie, state.holders, state.pool, wish)
    chosen: list[ReplicationRequested | ReclamationRequested] = [*copies]
    may_go = FirstRules(view, copies) if rules == FIRST else PresentRules(view, copies)
    excesses, passed = reclaiming.reclamations(view, number, may_go)
    for excess in excesses:
        chosen += reclamation.request(state.operations, state.holders, excess)
    return [
        CacheScanCompleted(
            scan=number,
            to_seq=state.seen_seq,
            nodes=len(state.trie.nodes),
            holders=state.trie.copies,
            inter_candidates=len(inter),
            intra_candidates=len(intra),
            reclaim_candidates=reclaimable,
            chosen=tuple(each.operation for each in chosen),
            rules=rules,
            passed=passed if rules >= PRESENT else 0,
        ),
        *chosen,
    ]


def settle(state: State, now_ns: int, told: Mapping[str, str]) -> list[EventData]:
    """What has come of the operations under way. `told` says why the agents could not, by operation."""
    settled: list[EventData] = []
    for name, copy in state.operations.open.items():
        settled += replication.settle(copy, state.pool, now_ns, told.get(name))
    for name, going in state.operations.reclaiming.items():
        settled += reclamation.settle(going, now_ns, told.get(name))
    return settled


def orders(state: State) -> dict[str, Copy | Evict]:
    """What to ask of which agents now, by operation; repetitions do no harm."""
    found: dict[str, Copy | Evict | None] = {
        name: replication.order(each, state.trie, state.term) for name, each in state.operations.open.items()
    }
    for name, each in state.operations.reclaiming.items():
        found[name] = reclamation.order(each, state.trie, state.term)
    return {name: order for name, order in found.items() if order is not None}


def reconcile_placements(state: State) -> list[EventData]:
    """`placement-reconciled` for each node whose ranks have all adopted a planned epoch."""
    found = ((plan, state.pool.nodes.get(node)) for node, plan in sorted(state.plans.items()))
    known = Known(state.holders, state.trie, state.parameters)
    return [
        reconcile(plan, node, known)
        for plan, node in found
        if node is not None
        and node.spec is not None
        and set(node.adopted.values()) == {plan.epoch}
        and (node.id, plan.epoch) not in state.holders.reconciled
    ]
