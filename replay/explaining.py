"""Why a request went where it went, and what became of it.

Most of it is recorded: the winner, the best of each degree and the next four, with every part of their prices. The others, and
which worker was excluded for which reason, are in no event; they follow from the state that the router decided on, which
`recompute` folds from the log's beginning or from the last state that was kept before.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from uuid import UUID

from replay import history, keeping
from replay.beginnings import Past
from replay.freezing import known
from replay.pool_routers import Routers
from replay.routers import Decided
from services.ledger import database, queries, reading
from services.ledger.queries import EventFilter, Json, Named
from services.router import decider, placement
from shared.contracts.codec import BadEvent
from shared.contracts.envelope import Stored
from shared.contracts.events import (
    ENDS,
    CalibrationUpdated,
    Exclusion,
    KvHandedOff,
    PrefillAborted,
    PrefillCompleted,
    PrefillStarted,
    PricedCandidate,
    RequestAssigned,
    RequestReceived,
    RequestRedirected,
    RouterLost,
)
from shared.contracts.ids import WorkerId
from shared.model.cost import refit_seq

RECOMPUTED_EVENTS_MAX = 20_000
"""Where a decision lies this close to its log's beginning or a kept state, folding takes about a second: nobody has to ask."""


RUN_UP_EVENTS = 1_000
"""Between a kept state and the placement: more than a router lags that serves."""


class Unknown(LookupError):
    """The record does not know the request; the message says how far the record goes."""


class Weighed(NamedTuple):
    """The whole of one decision's weighing. `excluded` is None where only the counts were recorded."""

    candidates: tuple[PricedCandidate, ...]
    excluded: dict[WorkerId, Exclusion] | None


class Attempt(NamedTuple):
    """One placement of the request, and what became of it; what did not happen is None."""

    stored: Stored
    assigned: RequestAssigned
    recorded_all: bool
    """Whether every candidate was recorded one by one: their prices give the digest."""
    weighed: Weighed | None
    """What was recomputed, None if it was not."""
    started: PrefillStarted | None
    completed: PrefillCompleted | None
    aborted: PrefillAborted | None
    handed_off: KvHandedOff | None
    redirected: RequestRedirected | None


class Explanation(NamedTuple):
    """Everything that the record says of a request. `received` is None where its beginning is missing; `notes` tell what a
    reader must know besides."""

    request: str
    log: str
    events: tuple[Stored, ...]
    received: Stored | None
    attempts: tuple[Attempt, ...]
    end: Stored | None
    notes: tuple[str, ...]


async def explain(
    database_url: str, name: str, *, recompute: bool | None = None, progress: Callable[[int], None] | None = None
) -> Explanation:
    """Explain the request with the id `name`, as the record or its client knows it. `recompute` None: if that is quick.

    Errors: Unknown; BadState; those of `database.connect`.
    """
    async with database.view(database_url) as connection:
        (request, told, _), notes = await _find(connection, name)
        events = _stored(told["events"], notes)
        if told["request"] and told["request"]["ended"] == "router-lost":
            events += await _loss(connection, told["request"])
        weighed = await _recomputed(connection, events, recompute, notes, progress)
        await _note_place(connection, events, notes)
        await _note_refits(connection, events, notes)
    return Explanation(
        request=request,
        log=events[0].log if events else "",
        events=tuple(events),
        received=next((each for each in events if isinstance(each.data, RequestReceived)), None),
        attempts=tuple(_attempts(events, weighed)),
        end=next((each for each in events if isinstance(each.data, (*ENDS, RouterLost))), None),
        notes=tuple(notes),
    )


async def _find(connection: Any, name: str) -> tuple[Named, list[str]]:
    """The request of this id, or the newest one whose client gave it this id."""
    found = await queries.request_named(connection, name)
    if found is None:
        state = await queries.state(connection)
        at = state["checkpoint"]
        raise Unknown(
            f"{name}: no request of the record has this id, and no client has given it"
            + (f"; the record reaches to {at['log']}:{at['stream_seq']}" if at else "; the record is empty")
        )
    others = [f"its client gave the same id to {len(found.earlier)} earlier requests: {', '.join(found.earlier[:5])}"]
    return found, others if found.earlier else []


def _stored(events: Iterable[Json], notes: list[str]) -> list[Stored]:
    told = []
    for each in events:
        try:
            told.append(history.stored(each))
        except BadEvent as bad:
            notes.append(f"event {each['stream_seq']} cannot be read: {bad}")
    return told


async def _loss(connection: Any, row: Json) -> list[Stored]:
    """The `router-lost` that ended a request: it is about its router, not about any one request."""
    found = await queries.event_of_id(connection, row["end_id"])
    return [history.stored(found)] if found else []


async def _note_place(connection: Any, events: list[Stored], notes: list[str]) -> None:
    """Say what a reader must know of where the events lie: in an older log, next to a gap, without their beginning."""
    logs = {str(each.log): each for each in await reading.logs(connection)}
    if not events:
        notes.append("the record has its row and no event of it that can be read")
        return
    log = logs[events[0].log]
    newest = max(each.number for each in logs.values())
    if log.number < newest:
        ended = f"which ended at {log.stream_seq}: the stream was lost or put back"
        notes.append(f"it is of log {log.number} of {newest}, {ended}")
    first, last = events[0].stream_seq, events[-1].stream_seq
    if not isinstance(events[0].data, RequestReceived):
        why = "it was dropped by the stream before it was copied"
        if log.begins is not None:
            why = f"this is a part of one, which begins behind {log.after_seq}"
        notes.append(f"its beginning is not in the record: {why}")
    for begin, end in log.gaps:
        if first - 1 <= end and begin <= last + 1:
            notes.append(f"events {begin} to {end} are missing (an accepted gap): some of them may have been about it")


async def _note_refits(connection: Any, events: list[Stored], notes: list[str]) -> None:
    """Say what coefficients were fitted to that are not those that the pool was started with."""
    attempts = [(each.log, each.data) for each in events if isinstance(each.data, RequestAssigned)]
    for log, version in dict.fromkeys((log, data.coefficients_version) for log, data in attempts):
        if (to_seq := refit_seq(version)) is None:
            continue
        fits = EventFilter(type=CalibrationUpdated.TYPE)
        for each in _stored(await queries.events(connection, UUID(log), to_seq, fits, 1), notes):
            fit = each.data
            # It may have been fitted in an earlier log, from which this one has it.
            if isinstance(fit, CalibrationUpdated) and fit.coefficients.get("version") == version:
                notes.append(
                    f"coefficients {version} were fitted to {fit.samples} prefills up to event {fit.to_seq}: "
                    f"a mean error of {fit.error_before:.1%} became {fit.error_after:.1%}"
                )


def _attempts(events: list[Stored], weighed: dict[int, Weighed]) -> Iterable[Attempt]:
    for stored in events:
        if not isinstance(stored.data, RequestAssigned):
            continue
        data = stored.data
        prices = ((each.worker, each.price_us) for each in data.candidates)

        def of(kind: type[Any], attempt: int = data.attempt) -> Any:
            return next((e.data for e in events if isinstance(e.data, kind) and e.data.attempt == attempt), None)

        yield Attempt(
            stored=stored,
            assigned=data,
            recorded_all=placement.digest(prices, data.digest_version) == data.price_digest,
            weighed=weighed.get(stored.stream_seq),
            started=of(PrefillStarted),
            completed=of(PrefillCompleted),
            aborted=of(PrefillAborted),
            handed_off=of(KvHandedOff),
            redirected=of(RequestRedirected),
        )


async def _recomputed(
    connection: Any,
    events: list[Stored],
    recompute: bool | None,
    notes: list[str],
    progress: Callable[[int], None] | None,
) -> dict[int, Weighed]:
    """The whole weighing of each placement, by sequence."""
    placed = [each for each in events if isinstance(each.data, RequestAssigned)]
    if not placed or recompute is False:
        return {}
    logs = await reading.logs(connection)
    log = next(each for each in logs if str(each.log) == placed[0].log)
    bound = max(placed[0].stream_seq - RUN_UP_EVENTS, log.after_seq)
    is_near = placed[-1].stream_seq - await keeping.nearest(connection, log, bound) <= RECOMPUTED_EVENTS_MAX
    if recompute is None and not is_near:
        return {}
    frozen = await keeping.before(connection, log, bound)
    after_seq = frozen.stream_seq if frozen is not None else 0
    # Another version may have kept the nearest state.
    if recompute is None and placed[-1].stream_seq - after_seq > RECOMPUTED_EVENTS_MAX:
        return {}
    wanted = {each.stream_seq for each in placed}
    weighed: dict[int, Weighed] = {}

    def judge(decided: Decided) -> None:
        if decided.recorded.stream_seq not in wanted:
            return
        if decided.derived is None or decided.state is None or decided.question is None:
            notes.append(f"attempt at {decided.recorded.stream_seq} cannot be recomputed: {decided.why_not}")
        else:
            weighed[decided.recorded.stream_seq] = _weigh(decided)

    begun = known(frozen, await history.registrations(connection, log.log))
    past = Past(await history.inherited(connection, logs, log)) if frozen is None else frozen.past
    source = placed[0].event.source
    routers = Routers([each for each in begun if each.source == source], past, judge, lambda other: other == source)
    if frozen is not None:
        routers.begin_at(frozen)
    folded = 0
    missing = await history.holes(connection, log, routers, after_seq)
    async for page in history.pages(connection, log, missing, placed[-1].stream_seq, after_seq):
        for stored in page:
            routers.fold(stored, stored.stream_seq in wanted)
            past.fold(stored)
        folded += len(page)
        if progress is not None:
            progress(folded)
    return weighed


def _weigh(decided: Decided) -> Weighed:
    """Every candidate with its price, and every other worker with the reason against it, on the state decided on."""
    state, question = decided.state, decided.question
    assert state is not None and question is not None, "the caller has looked"  # noqa: PT018
    everybody = len(state.pool.workers)
    placed, excluded = decider.weigh(state, question, runners_up=everybody)
    return Weighed(placed.candidates if placed else (), excluded)
