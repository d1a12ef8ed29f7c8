"""What a start needs of events that the log may have dropped: the newest of each kind, as they were published.

The stream keeps 48 hours or so many bytes. A node that registered before that, its committed epoch, a cordon, a changed
parameter still hold. The controller folds them along and stores them next to the log (`services/controller/keeper.py`); who
starts folds those that lie before the log's first event, and then the log (`shared/runtime/projection.py`). Rules:

1.  Folding the kept events gives the nodes, sagas, parameters, terms and routers that folding every event gives.
2.  So it does when the log still has some of the dropped ones as well: an event is kept until one that makes it void,
    whatever came between.
3.  What is kept is bounded by the nodes there have been, their ranks, the router processes that live and the parameters.
    Requests and blocks are not kept: a request may end that never began, a cache is `blind` until its agent reports it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.envelope import Stored
from shared.contracts.events import (
    SERVING,
    CacheLeadershipTaken,
    CacheScanCompleted,
    CalibrationUpdated,
    CompositionPinned,
    CompositionUnpinned,
    Cordoned,
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    Frozen,
    LeadershipTaken,
    NodeDeclaredLost,
    NodeLost,
    NodeRegistered,
    ParametersChanged,
    RankAdoptedEpoch,
    ReconfigurationPlanned,
    RouterLost,
    RouterRegistered,
    Thawed,
    Uncordoned,
    WindowClosed,
)
from shared.contracts.ids import NodeId
from shared.model import parameters as parameters_model
from shared.model.parameters import Parameters

Key = tuple[str, ...]
"""Which of the kept events a newer one takes the place of: what it is about, and who."""

LASTING = (
    NodeRegistered, NodeLost, NodeDeclaredLost, RankAdoptedEpoch, EpochCommitted, EpochAborted, Cordoned, ParametersChanged,
    Frozen, CalibrationUpdated, CompositionPinned,
)  # fmt: skip
"""What outlives the log itself. The rest speaks of sequences and of processes that end with it."""

SAGA = ("planned", "drain", "drained")


@dataclass(slots=True)
class Keepsake:
    """State of the fold; `evolve` is its only writer. `kept` is in the log's order. `changes` counts what a start must not
    miss: all but windows and scans, of which the last one is as good as the one before."""

    kept: dict[Key, Stored] = field(default_factory=dict)
    seen_seq: int = 0
    changes: int = 0


def evolve(keepsake: Keepsake, stored: Stored) -> None:
    """Fold one event."""
    keepsake.seen_seq = max(keepsake.seen_seq, stored.stream_seq)
    if type(stored.data) in SERVING:
        return
    match stored.data:
        case NodeRegistered() | NodeLost() | NodeDeclaredLost() | RankAdoptedEpoch():
            _life(keepsake, stored, stored.data)
        case EpochCommitted() | EpochAborted():
            _epoch(keepsake, stored, stored.data)
        case ReconfigurationPlanned() as data:
            _keep(keepsake, ("planned", data.node), stored)
        case DrainStarted() as data:
            _keep(keepsake, ("drain", data.node), stored)
        case DrainCompleted() as data:
            _keep(keepsake, ("drained", data.node), stored)
        case Cordoned() as data:
            _keep(keepsake, ("cordon", data.node), stored)
        case Uncordoned() as data:
            _drop(keepsake, ("cordon", data.node))
        case CompositionPinned() as data:
            _keep(keepsake, ("pin", data.node), stored)
        case CompositionUnpinned() as data:
            _drop(keepsake, ("pin", data.node))
        case ParametersChanged():
            _keep(keepsake, ("parameters", str(stored.event.id)), stored)
            _prune_parameters(keepsake)
        case Frozen():
            _keep(keepsake, ("frozen",), stored)
        case Thawed():
            _drop(keepsake, ("frozen",))
        case RouterRegistered():
            _keep(keepsake, ("router", stored.event.source), stored)
        case RouterLost() as data:
            _drop(keepsake, ("router", data.source))
        case CalibrationUpdated() | LeadershipTaken() | CacheLeadershipTaken():
            _keep(keepsake, (stored.event.type,), stored)
        case WindowClosed() | CacheScanCompleted():
            _replace(keepsake, (stored.event.type,), stored)
        case _:
            pass


def _replace(keepsake: Keepsake, key: Key, stored: Stored) -> None:
    """Last, so that the order stays the log's."""
    keepsake.kept.pop(key, None)
    keepsake.kept[key] = stored


def _keep(keepsake: Keepsake, key: Key, stored: Stored) -> None:
    _replace(keepsake, key, stored)
    keepsake.changes += 1


def _drop(keepsake: Keepsake, *keys: Key) -> None:
    for key in keys:
        if keepsake.kept.pop(key, None) is not None:
            keepsake.changes += 1


def _life(
    keepsake: Keepsake, stored: Stored, data: NodeRegistered | NodeLost | NodeDeclaredLost | RankAdoptedEpoch
) -> None:
    """A registration voids what was said of earlier incarnations; late words of those are void themselves (`pool.py`)."""
    found = keepsake.kept.get(("registered", data.node))
    registered = found.data if found and isinstance(found.data, NodeRegistered) else None
    incarnation = registered.incarnation if registered else 0
    match data:
        case NodeRegistered():
            if data.incarnation > incarnation:
                ranks = range(max(data.prefill_ranks, registered.prefill_ranks if registered else 0))
                _drop(keepsake, ("lost", data.node), *(("adopted", data.node, str(rank)) for rank in ranks))
                _keep(keepsake, ("registered", data.node), stored)
        case _ if data.incarnation != incarnation:
            pass
        case RankAdoptedEpoch():
            _keep(keepsake, ("adopted", data.node, str(data.rank)), stored)
        case NodeLost() | NodeDeclaredLost():
            _keep(keepsake, ("lost", data.node), stored)


def _epoch(keepsake: Keepsake, stored: Stored, data: EpochCommitted | EpochAborted) -> None:
    """Either ends the saga. An aborted epoch stays, while it is the highest: its number must not be used again."""
    node = data.node
    _drop(keepsake, *((step, node) for step in SAGA))
    if isinstance(data, EpochCommitted):
        _keep(keepsake, ("committed", node), stored)
        if _number(keepsake, "aborted", node) <= data.epoch:
            _drop(keepsake, ("aborted", node))
    elif data.epoch > max(_number(keepsake, "aborted", node), _number(keepsake, "committed", node)):
        _keep(keepsake, ("aborted", node), stored)


def _number(keepsake: Keepsake, what: str, node: NodeId) -> int:
    found = keepsake.kept.get((what, node))
    return found.data.epoch if found and isinstance(found.data, EpochCommitted | EpochAborted) else 0


def _prune_parameters(keepsake: Keepsake) -> None:
    """Drop every change without which the same would hold now and would have held at each commit: a worker's capacity was
    committed for the window of that time. Tried, not reasoned: whether a change is valid depends on those before it."""
    relevant = {key: each for key, each in keepsake.kept.items() if key[0] in ("parameters", "committed")}
    told = _told(relevant.values())
    for key in [key for key in relevant if key[0] == "parameters"]:
        without = {each: stored for each, stored in relevant.items() if each != key}
        if _told(without.values()) == told:
            relevant = without
            _drop(keepsake, key)


def _told(events: Iterable[Stored]) -> tuple[Parameters, dict[NodeId, int]]:
    """The parameters, and the window length at each node's commit."""
    parameters, window_s = Parameters(), {}
    for stored in events:
        if isinstance(stored.data, EpochCommitted):
            window_s[stored.data.node] = parameters.window_s
        parameters = parameters_model.evolve(parameters, stored)
    return parameters, window_s
