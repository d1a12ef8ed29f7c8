"""What one event changes in the rows of requests, epochs, windows, parameters and replicas. Pure.

A patch names a row by its key and the columns it sets; columns it does not name stay. So a row is the patches of its events
in order, and patches of one row within a batch become one.
"""

from typing import Any, NamedTuple

from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import (
    DrainStarted,
    EpochAborted,
    EpochCommitted,
    KvHandedOff,
    PlacementReconciled,
    PrefillCompleted,
    PrefillStarted,
    ReclamationFailed,
    ReclamationRequested,
    ReconfigurationPlanned,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
    ReplicationRequested,
    RequestAssigned,
    RequestCancelled,
    RequestCompleted,
    RequestFailed,
    RequestReceived,
    RequestRedirected,
    RequestRejected,
    RouterLost,
    WindowClosed,
)
from shared.contracts.ids import RequestId

Row = dict[str, Any]


class Place(NamedTuple):
    """Where an event lies: the log's number and the sequence in it order all events of the record."""

    log: int
    seq: int


class Patch(NamedTuple):
    """`row` holds the key's columns too."""

    table: str
    row: Row


def patches(place: Place, stored: Stored) -> list[Patch]:
    """The patches of one event, ends of requests excepted (`end`)."""
    data, time_ns = stored.data, stored.event.time_ns
    if isinstance(data, WindowClosed):
        row = {"log": place.log, "k": data.k, "closed_ns": time_ns, "data": data.model_dump(mode="json")}
        return [Patch("windows", row)]
    found = (
        _request(place, stored)
        or _epoch(place, data, time_ns, str(stored.event.id))
        or _replication(data, time_ns)
        or _reclamation(data, time_ns)
    )
    return [found] if found else []


def end_at_once(place: Place, stored: Stored, request: RequestId) -> Patch:
    """A request whose router had been declared lost before it received it."""
    row = end(place, stored, request).row
    return Patch("requests", {**row, "ended": RouterLost.TYPE})


def end(place: Place, stored: Stored, request: RequestId) -> Patch:
    """The end of a request: by its own event, or with its router."""
    event = stored.event
    row: Row = {
        "request": request,
        "ended": event.type.removeprefix("request-"),
        "end_id": str(event.id),
        "end_log": place.log,
        "end_seq": place.seq,
        "end_ns": event.time_ns,
    }
    match event.data:
        case RequestCompleted() as data:
            row |= data.model_dump(include={"worker", "ttft_us", "tpot_us", "output_tokens", "cached_tokens"})
            row |= {"end_reason": data.finish, "queue_us": data.queue_us, "prefill_us": data.prefill_us}
            row |= {"fetch_us": data.fetch_us, "handoff_us": data.handoff_us}
        case RequestFailed() | RequestRejected() | RequestCancelled() as data:
            row["end_reason"] = data.reason
        case _:
            pass
    return Patch("requests", row)


def _request(place: Place, stored: Stored) -> Patch | None:
    event = stored.event
    match event.data:
        case RequestReceived() as data:
            row = data.model_dump(include={"request", "tenant", "model", "prompt_tokens", "max_tokens", "slo_us"})
            row["client_digest"] = data.client_digest
            row |= {"source": event.source, "received_id": str(event.id), "received_ns": event.time_ns}
            row |= {"received_log": place.log, "received_seq": place.seq}
        case RequestAssigned() as data:
            row = data.model_dump(include={"request", "worker", "degree", "decode_worker", "policy"})
            row |= {"attempts": data.attempt, "assigned_ns": event.time_ns}
            row |= {"predicted_queue_us": data.queue_us, "predicted_service_us": data.service_us}
            row |= {"predicted_cached_tokens": data.cached_tokens}
            row["price_us"] = data.candidates[0].price_us if data.candidates else None
        case RequestRedirected() as data:
            row = {"request": data.request, "redirect_reason": data.reason}
        case PrefillStarted() as data:
            row = {"request": data.request, "queue_us": data.queue_us}
        case PrefillCompleted() as data:
            row = data.model_dump(include={"request", "queue_us", "fetch_us", "prefill_us", "computed_tokens"})
            cached = data.cached_own_tokens + data.cached_in_flight_tokens + data.cached_fetched_tokens
            row["cached_tokens"] = cached
        case KvHandedOff() as data:
            row = {"request": data.request, "handoff_us": data.handoff_us}
        case _:
            return None
    return Patch("requests", row)


def _epoch(place: Place, data: EventData, time_ns: int, event_id: str) -> Patch | None:
    match data:
        case ReconfigurationPlanned():
            row = data.model_dump(include={"policy", "reason", "old_composition", "new_composition"})
            row |= {"status": "planned", "planned_ns": time_ns}
        case DrainStarted():
            row = {"status": "draining", "drain_started_ns": time_ns}
        case PlacementReconciled():
            row = {"status": "reconciled", "reconciled_id": event_id}
        case EpochCommitted():
            row = {"status": "committed", "ended_ns": time_ns, "new_composition": data.composition}
            row |= {"drain_us": data.drain_us, "switch_us": data.switch_us}
        case EpochAborted():
            row = {"status": "aborted", "ended_ns": time_ns, "reason": f"{data.step}: {data.reason}"}
        case _:
            return None
    return Patch("epochs", {"log": place.log, "node": data.node, "epoch": data.epoch, **row})


def _replication(data: EventData, time_ns: int) -> Patch | None:
    match data:
        case ReplicationRequested():
            row = data.model_dump(include={"operation", "kind", "degree", "sources", "blocks", "score"})
            row |= {"status": "requested", "z": data.z.hex(), "worker": data.destination, "requested_ns": time_ns}
        case ReplicaInstalled():
            row = {"operation": data.operation, "status": "installed", "copy_us": data.copy_us, "ended_ns": time_ns}
        case ReplicationFailed():
            row = {"operation": data.operation, "status": "failed", "reason": data.reason, "ended_ns": time_ns}
        case _:
            return None
    return Patch("replicas", row)


def _reclamation(data: EventData, time_ns: int) -> Patch | None:
    match data:
        case ReclamationRequested():
            row = data.model_dump(include={"operation", "worker", "blocks", "score"})
            row |= {"kind": "reclamation", "status": "requested", "z": data.z.hex(), "requested_ns": time_ns}
        case ReplicaReclaimed():
            row = {"operation": data.operation, "status": "reclaimed", "ended_ns": time_ns}
        case ReclamationFailed():
            row = {"operation": data.operation, "status": "failed", "reason": data.reason, "ended_ns": time_ns}
        case _:
            return None
    return Patch("replicas", row)
