"""From where a log is folded: its beginning, or a state of the deciders that was kept; and how such a state is made."""

from collections.abc import Callable, Sequence
from typing import Any

from replay import history
from replay.findings import Findings
from replay.freezing import Frozen, known, read
from replay.verifying import EVERYTHING, SEQ_MAX, LogVerifier, Span
from services.ledger import database, partial, reading, snapshots, states
from services.ledger.patches import Place
from services.ledger.reading import LogInfo
from services.ledger.readmodels import ReadModels
from shared.runtime.states import BadState, freeze

RUN_UP_EVENTS = 20_000
"""Folded before the first event of a range: more than any process lags, so nothing of the range was decided on less."""

KEPT_APART_EVENTS = 1_000
"""Between two kept states at least: else all that stay of a pool with little to do would lie within one run-up, and the record
be folded from its beginning again and again."""

OTHER_VERSION = (
    "this record is a part, and the state with which it begins was written by another version: read it with that one, or "
    "export the part again with this one"
)

NOTHING = Span(from_seq=SEQ_MAX)


class NoState(LookupError):
    """The record has no sealed snapshot there. The message says where it has some."""


async def first(connection: Any, log: LogInfo) -> Frozen | None:
    """What a log begins with that is a part of another one; None for others. Errors: BadState."""
    if log.begins is None:
        return None
    try:
        return read(await states.content(connection, Place(log.number, log.after_seq)))
    except BadState as error:
        raise BadState(f"{OTHER_VERSION} ({error})") from error


async def before(connection: Any, log: LogInfo, seq: int) -> Frozen | None:
    """The newest state of the log, kept at `seq` or before, from which every process can be followed that comes later; else
    what the log begins with. Errors: BadState."""
    begun = await history.registrations(connection, log.log)
    for each in reversed(await states.places(connection, log.number)):
        if log.after_seq < each <= seq:
            try:
                found = read(await states.content(connection, Place(log.number, each)))
            except BadState:
                # Another version has kept it: the log itself is read by every version.
                continue
            if found.covers(begun):
                return found
    return await first(connection, log)


async def nearest(connection: Any, log: LogInfo, seq: int) -> int:
    """Where `before` begins at the earliest try: to look there costs nothing, and to read a state some 100 ms."""
    return max((each for each in await states.places(connection, log.number) if each <= seq), default=log.after_seq)


async def since_kept(connection: Any, logs: Sequence[LogInfo]) -> Span:
    """What the newest log has behind the newest kept state; the whole record without one."""
    kept = await states.places(connection, logs[-1].number) if logs else []
    return Span(from_seq=kept[-1] + 1) if kept else EVERYTHING


async def next_to_keep(connection: Any, logs: Sequence[LogInfo]) -> int:
    """The newest seal of the newest log, if its state is to be kept; 0 if there is none, or one was kept just before."""
    if not logs:
        return 0
    number = logs[-1].number
    sealed = max((place.seq for place in await partial.sealed_places(connection, number, logs[-1].log)), default=0)
    kept = await states.places(connection, number)
    return 0 if kept and sealed < kept[-1] + KEPT_APART_EVENTS else sealed


async def for_span(connection: Any, log: LogInfo, span: Span) -> Frozen | None:
    """Where to begin, so that every decision of the span of this newest log is derived as from the beginning.

    Errors: BadState.
    """
    bounds = [span.from_seq - 1] if span.from_seq else []
    if (sealed := await snapshots.before_time(connection, span.from_ns)) is not None:
        bounds += [sealed.seq] if sealed.log == log.number else []
    return await before(connection, log, max(bounds, default=0) - RUN_UP_EVENTS)


async def fold(
    connection: Any, logs: Sequence[LogInfo], place: Place, progress: Callable[[int], None] | None = None
) -> bytes:
    """What the deciders have folded at a place of the newest log, frozen. Errors: BadState."""
    log = logs[-1]
    frozen = await before(connection, log, place.seq)
    if frozen is not None and frozen.stream_seq == place.seq:
        return freeze(frozen)
    begun = known(frozen, await history.registrations(connection, log.log))
    inherited = await history.inherited(connection, logs, log) if frozen is None else ()
    verifier = LogVerifier(str(log.log), begun, NOTHING, Findings(), inherited=inherited, frozen=frozen)
    after_seq = frozen.stream_seq if frozen is not None else 0
    missing = await history.holes(connection, log, verifier, after_seq)
    folded = 0
    async for page in history.pages(connection, log, missing, place.seq, after_seq):
        for stored in page:
            verifier.fold(stored)
        folded += len(page)
        if progress is not None:
            progress(folded)
    return freeze(verifier.frozen(place.seq))


async def beginning(
    database_url: str, span: Span, progress: Callable[[int], None] | None = None
) -> tuple[Place, bytes]:
    """The sealed place from which a range of the newest log is exported, and what the deciders had folded there: a run-up
    before the range, if the record has a seal there.

    Errors: NoState; BadState; those of `database.connect`.
    """
    async with database.view(database_url) as connection:
        logs = await reading.logs(connection)
        if not logs:
            raise NoState("the record is empty")
        log = logs[-1]
        sealed = list(await partial.sealed_places(connection, log.number, log.log))
        bound = span.from_seq - 1
        if not span.from_seq:
            at = await snapshots.before_time(connection, span.from_ns)
            bound = at.seq if at is not None and at.log == log.number else 0
        fits = [each for each in sealed if each.seq <= bound]
        if not fits:
            told = f"the oldest is that at {log.log}:{sealed[0].seq}" if sealed else "there is none"
            raise NoState(f"no sealed state lies before the range: {told}; without --from the record has its beginning")
        place = next((each for each in reversed(fits) if each.seq <= bound - RUN_UP_EVENTS), fits[-1])
        return place, await fold(connection, logs, place, progress)


def check(begun: partial.Beginning, models: ReadModels) -> None:
    """Whether what the deciders of a bundle had folded is a state, and agrees with its sealed read models. Errors: BadState."""
    frozen = read(begun.deciders)
    if frozen.stream_seq != begun.place.seq:
        raise BadState(f"the deciders had folded up to {frozen.stream_seq}, and it begins behind {begun.place.seq}")
    for each in frozen.folds:
        state, pending = each.state()
        if pending:
            continue
        if state.parameters != models.parameters:
            raise BadState("the deciders had other parameters than the snapshot")
        if {name: node.composition for name, node in state.pool.nodes.items()} != {
            name: node.composition for name, node in models.pool.nodes.items()
        }:
            raise BadState("the deciders had another pool than the snapshot")
