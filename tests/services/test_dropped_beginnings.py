"""Folds of a story that holds every kind of event, from each of its events on."""

from shared.contracts.envelope import EVENT_TYPES, EventData
from shared.contracts.events import (
    BlockDayDropped,
    BlockRun,
    BlocksEvicted,
    BlocksStored,
    CacheLeadershipTaken,
    CacheReported,
    CacheScanCompleted,
    CalibrationUpdated,
    CompositionPinned,
    CompositionUnpinned,
    Cordoned,
    DrainCompleted,
    DrainStarted,
    EpochAborted,
    ForecastMade,
    Frozen,
    KvHandedOff,
    LeadershipTaken,
    LogReset,
    LogSealed,
    NodeDeclaredLost,
    NodeLost,
    ParametersChanged,
    PlacementReconciled,
    PrefillAborted,
    PrefillStarted,
    ReclamationFailed,
    ReclamationRequested,
    ReconciledWorker,
    ReconfigurationAdvised,
    ReconfigurationPlanned,
    ReplicaInstalled,
    ReplicaReclaimed,
    ReplicationFailed,
    ReplicationRequested,
    RequestCancelled,
    RequestFailed,
    RequestHeld,
    RequestRedirected,
    RequestRejected,
    RequestsRefused,
    RouterLost,
    RouterRegistered,
    Thawed,
    Uncordoned,
    WindowClosed,
)
from shared.contracts.ids import NodeId, RequestId, RouterId, TenantId, WorkerId
from shared.model.cost import load_coefficients
from tests.support.every_service import every_service_folds_every_end_of
from tests.support.story import Story, adopted, assigned, committed, completed, prefilled, received, registered

N0 = NodeId("n0")
OLD, OTHER_OLD, NEW = WorkerId("n0/1/0"), WorkerId("n0/1/4"), WorkerId("n0/2/0")
ROUTER, AGENT = "router-1-0000", "worker-1-0000-n0"
BLOCKS = [bytes([n]) * 16 for n in range(1, 9)]


def chain(*blocks: int) -> bytes:
    return b"".join(BLOCKS[n] for n in blocks)


def stored(number: int, request: str | None, *blocks: int, worker: WorkerId = OLD) -> BlocksStored:
    """By a prefill of `request`, or copied."""
    if request is not None:
        of_request = {"cause": "prefill", "request": RequestId(request), "first_depth": blocks[0]}
        return BlocksStored(worker=worker, incarnation=1, number=number, blocks=len(blocks), **of_request)
    runs = (BlockRun(block_ids=chain(*blocks)),)
    return BlocksStored(worker=worker, incarnation=1, number=number, cause="replication", blocks=len(blocks), runs=runs)


def serve(story: Story, request: str, end: EventData | None, number: int, *blocks: int) -> None:
    """From its receipt to its end; what it computes beyond the prefix that is there is stored."""
    story.tell(received(request, 850, block_ids=chain(*range(8))), assigned(request, OLD, 850), source=ROUTER)
    of = {"request": RequestId(request), "attempt": 1, "worker": OLD}
    story.tell(PrefillStarted(queue_us=1, **of), prefilled(request, OLD, 850), source=AGENT)
    story.tell(stored(number, request, *blocks), source=AGENT)
    story.tell(KvHandedOff(decode_worker=WorkerId("n0/decode/0"), bytes=1, handoff_us=1, **of), source=AGENT)
    if end is not None:
        story.tell(end, source=ROUTER)


def cut_off(story: Story, request: str, *ends: EventData) -> None:
    """Received and assigned, then this."""
    story.tell(received(request, 100), assigned(request, OLD, 100), *ends, source=ROUTER)


def requests(story: Story) -> None:
    r = RequestId
    story.tell(RouterRegistered(router=RouterId("r")), source=ROUTER)
    story.tell(RequestsRefused(tenant=TenantId("t"), reason="limit", count=3), source=ROUTER)
    serve(story, "whole", completed("whole", OLD, 1), 1, 0, 1, 2)
    serve(story, "again", completed("again", OLD, 1), 2, 3, 4)
    story.tell(BlocksEvicted(worker=OLD, incarnation=1, number=3, cause="pressure", block_ids=chain(4)), source=AGENT)
    gone = PrefillAborted(request=r("moved"), attempt=1, worker=OLD, reason="draining")
    moved = RequestRedirected(request=r("moved"), attempt=1, worker=OLD, reason="draining")
    cut_off(story, "moved", moved, assigned("moved", OTHER_OLD, 100, attempt=2))
    story.tell(gone, source=AGENT)
    cut_off(story, "failed", RequestFailed(request=r("failed"), reason="engine"))
    cut_off(story, "left", RequestCancelled(request=r("left")))
    story.tell(received("refused", 7), RequestRejected(request=r("refused"), reason="too-long"), source=ROUTER)
    held = {
        "parameters_version": 0,
        "seen_seq": 0,
        "now_ns": 1,
        "outstanding_us": 9,
        "share_us": 8,
        "service_us": 7,
        "ahead": 0,
    }
    wait = RequestHeld(request=r("patient"), tenant=TenantId("t"), uncached_tokens=7, **held)
    story.tell(received("patient", 7), wait, assigned("patient", OLD, 7), source=ROUTER)
    story.tell(RequestCancelled(request=r("patient")), source=ROUTER)
    cut_off(story, "orphan")
    story.tell(RouterLost(router=RouterId("r"), source=ROUTER))


def copies(story: Story) -> None:
    z, of = BLOCKS[1], {"operation": "one", "z": BLOCKS[1], "blocks": 2}
    story.tell(
        ReplicationRequested(
            kind="inter", degree=4, sources=(OLD,), destination=OTHER_OLD, first_depth=0, score=1, **of
        )
    )
    story.tell(stored(1, None, 0, 1, worker=OTHER_OLD), source=AGENT)
    story.tell(ReplicaInstalled(destination=OTHER_OLD, copy_us=1, **of))
    story.tell(ReplicationFailed(operation="two", z=z, destination=OTHER_OLD, reason="r"))
    story.tell(ReclamationRequested(worker=OTHER_OLD, score=1, **of), ReplicaReclaimed(worker=OTHER_OLD, **of))
    story.tell(ReclamationFailed(operation="three", z=z, worker=OLD, reason="r"))
    runs = tuple(BlockRun(parent=BLOCKS[n - 1] if n else None, block_ids=BLOCKS[n]) for n in range(3))
    parts = [
        CacheReported(worker=OLD, incarnation=1, number=3, part=part, parts=3, runs=(run,))
        for part, run in enumerate(runs, 1)
    ]
    story.tell(*parts, source=AGENT)


def reconfigurations(story: Story) -> None:
    old, new = (4, 4), (8,)
    plan = ReconfigurationPlanned(
        node=N0,
        epoch=2,
        policy="p",
        reason="r",
        old_composition=old,
        new_composition=new,
        retiring=(OLD, OTHER_OLD),
        coming=(NEW,),
    )
    begun = [plan, DrainStarted(node=N0, epoch=2, workers=(OLD, OTHER_OLD), deadline_us=1)]
    story.tell(*begun, EpochAborted(node=N0, epoch=2, step="draining", reason="r"), *begun)
    drained = DrainCompleted(node=N0, node_epoch=1, workers=(OLD, OTHER_OLD), returned_requests=0, drain_us=1)
    story.tell(drained, *adopted(epoch=2), source=AGENT)
    kept = ReconciledWorker(worker=NEW, retained=(BlockRun(block_ids=chain(0, 1)),))
    story.tell(PlacementReconciled(node=N0, epoch=2, workers=(kept,)), committed(epoch=2, composition=new))
    story.tell(NodeLost(node=N0, incarnation=1, reason="r"), registered(incarnation=2, epoch=2, composition=new))
    story.tell(NodeDeclaredLost(node=N0, incarnation=2, silent_us=1))


def decisions(story: Story) -> None:
    story.tell(LeadershipTaken(leader="c", term=1), CacheLeadershipTaken(leader="m", term=1))
    story.tell(ParametersChanged(parameters_version=1, changes={"beta": 4.0}, asked_by="ops"))
    story.tell(Frozen(asked_by="ops"), Thawed(asked_by="ops"))
    story.tell(Cordoned(node=N0, asked_by="ops"), Uncordoned(node=N0, asked_by="ops"))
    story.tell(CompositionPinned(node=N0, asked_by="ops"), CompositionUnpinned(node=N0, asked_by="ops"))
    advice = ReconfigurationAdvised(
        node=N0, policy="p", reason="r", old_composition=(8,), new_composition=(4, 4), window=1
    )
    forecast = ForecastMade(
        window=1, arrivals=1, replayed=1, stretch_us=1, pools=({8: 1},), moves=(0,), scores_ppm=(1,), coefficients={}
    )
    story.tell(advice, forecast)
    coefficients = load_coefficients("qwen3_30b_a3b_h20").model_dump()
    story.tell(CalibrationUpdated(coefficients=coefficients, samples=1, error_before=1, error_after=0))
    counts = {"inter_candidates": 0, "intra_candidates": 0, "reclaim_candidates": 0}
    story.tell(CacheScanCompleted(scan=1, to_seq=1, nodes=0, holders=0, **counts))
    nothing = {"long_tokens": 1, "long_request_share": 0, "long_token_share": 0, "capacity_us": 0, "demand_us": 0}
    story.tell(
        WindowClosed(k=1, from_seq=0, to_seq=1, length_us=1, requests=0, completed=0, prompt_tokens=0, **nothing)
    )
    story.tell(LogReset(old_log="a", new_log="b", old_last_seq=1))
    story.tell(LogSealed(sealed_log="b", from_seq=1, to_seq=1, count=1, head=b"h"))
    story.tell(BlockDayDropped(day="2026-11-10", kept_days=8, runs=()))


def test_wherever_the_log_begins_every_service_folds_it() -> None:
    story = Story()
    story.tell(registered(), *adopted(), source=AGENT)
    story.tell(committed(composition=(4, 4)))
    for part in (decisions, requests, copies, reconfigurations):
        part(story)
    told = {type(each.data) for each in story.events}
    assert told == set(EVENT_TYPES.values()), "an event is missing from the story"
    every_service_folds_every_end_of(story.events)
