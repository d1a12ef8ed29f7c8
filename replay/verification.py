"""The whole record verified, in as many processes as it is worth, on one view of the database."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, NamedTuple

from replay import history, keeping
from replay.findings import Findings
from replay.freezing import Frozen, known, together
from replay.garbage import seldom_collected
from replay.history import Hole
from replay.parts import Part, jobs_for, parts
from replay.verifying import EVERYTHING, LogVerifier, Span
from services.ledger import database, reading, states
from services.ledger.patches import Place
from services.ledger.reading import LogInfo
from shared.contracts.envelope import Stored
from shared.runtime.states import freeze

Progress = Callable[[int], None]


class Verification(NamedTuple):
    """What was read and what was found. `begun_seq` is where the folding began, 0 for the beginning; `kept` is the state at the
    newest seal, if it was asked for and there is one. `reached_seq` is up to where the newest log was."""

    logs: int
    events: int
    findings: Findings
    begun_seq: int = 0
    kept: Frozen | None = None
    reached_seq: int = 0

    @property
    def clean(self) -> bool:
        """Something was checked, and nothing differs."""
        return self.findings.clean and self.findings.checked.total() > 0


class _Asked(NamedTuple):
    """What one process is to derive. `view` names the view of the database that all of them share."""

    database_url: str
    view: str
    span: Span
    deep: bool
    part: Part
    keep_at: int
    """Behind which sequence of the newest log the state is kept, 0 for none."""


async def verify(
    database_url: str,
    span: Span = EVERYTHING,
    *,
    deep: bool = False,
    jobs: int | None = None,
    keep: bool = False,
    new: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Verify the record as of now, while others go on writing. Sequences in `span` are those of the newest log; `new` is what
    lies behind the newest kept state, instead. `jobs`: how many processes; None for what the record is worth.

    It is folded from its beginning, or, if `span` begins later, from a state that was kept before it. `keep`: keep the state at
    the newest seal for the next time, unless one was kept just before it, or something differs: what begins behind it would not
    find that again. `progress` is told how many events have been folded. Errors: BadState; those of `database.connect`.
    """
    async with database.view(database_url) as connection:
        logs = await reading.logs(connection)
        if new:
            span = await keeping.since_kept(connection, logs)
        [own, *others] = parts(jobs or jobs_for(sum(log.stream_seq for log in logs)))
        keep_at = await keeping.next_to_keep(connection, logs) if keep else 0
        view = await connection.fetchval("SELECT pg_export_snapshot()")
        with ExitStack() as stack:
            processes = None
            if others:
                pool = ProcessPoolExecutor(len(others), get_context("spawn"), end_with_parent)
                processes = stack.enter_context(pool)
            loop = asyncio.get_running_loop()
            asked = [_Asked(database_url, view, span, deep, part, keep_at) for part in (own, *others)]
            found = [loop.run_in_executor(processes, _elsewhere, each) for each in asked[1:]]
            with seldom_collected():
                # Together: whoever fails first is heard, and the others then are as well.
                shares = await asyncio.gather(_part(connection, logs, asked[0], progress), *found)
    findings = Findings.together([each.findings for each in shares])
    kept = [each.kept for each in shares if each.kept is not None]
    state = together(kept) if kept and findings.clean else None
    if state is not None:
        await _keep(database_url, Place(logs[-1].number, keep_at), state)
    return shares[0]._replace(findings=findings, kept=state)


async def _keep(database_url: str, place: Place, kept: Frozen) -> None:
    connection = await database.connect(database_url)
    try:
        await states.keep(connection, place, freeze(kept))
    finally:
        await connection.close()


def end_with_parent() -> None:
    """Begun in each process of a pool: it would wait for work for ever once the command that had it has been killed."""

    def wait() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()


def _elsewhere(asked: _Asked) -> Verification:
    """In a process of its own."""
    with seldom_collected():
        return asyncio.run(_on_view(asked))


async def _on_view(asked: _Asked) -> Verification:
    async with database.view(asked.database_url, asked.view) as connection:
        return await _part(connection, await reading.logs(connection), asked, None)


async def _part(connection: Any, logs: list[LogInfo], asked: _Asked, progress: Progress | None) -> Verification:
    told, inherited = Verification(len(logs), 0, Findings()), list[Stored]()
    frozen = await keeping.for_span(connection, logs[-1], asked.span) if logs else None
    for log in logs if frozen is None else logs[-1:]:
        begins = frozen if log is logs[-1] else await keeping.first(connection, log)
        after_seq = begins.stream_seq if begins is not None else 0
        span = asked.span if log is logs[-1] else asked.span.in_older_log()
        begun = known(begins, await history.registrations(connection, log.log))
        verifier = LogVerifier(
            *(str(log.log), begun, span, told.findings),
            inherited=inherited, deep=asked.deep, part=asked.part, frozen=begins,
        )  # fmt: skip
        kept = _Keeping(verifier, asked.keep_at if log is logs[-1] else 0, after_seq)
        missing = await history.holes(connection, log, verifier, after_seq)
        async for page in history.pages(connection, log, kept.among(missing), after_seq=after_seq):
            for stored in page:
                verifier.fold(stored)
            told = told._replace(events=told.events + len(page))
            if progress is not None:
                progress(told.events)
        await kept.at_end(log.stream_seq)
        verifier.end()
        inherited = verifier.past.legacy()
        told = told._replace(begun_seq=after_seq, kept=kept.frozen, reached_seq=min(log.stream_seq, asked.span.to_seq))
    return told


class _Keeping:
    """The state at a sequence, as the fold passes it; none if that lies before where it begins."""

    def __init__(self, verifier: LogVerifier, seq: int, after_seq: int) -> None:
        self.frozen: Frozen | None = None
        self._verifier = verifier
        self._seq = seq if seq > after_seq else 0

    def among(self, missing: list[Hole]) -> list[Hole]:
        """The holes, and this place between them."""
        here = [Hole(self._seq + 1, self._keep)] if self._seq else []
        return sorted([*here, *missing], key=lambda hole: hole.seq)

    async def at_end(self, seq: int) -> None:
        """The log is over at `seq`."""
        if self._seq == seq and self.frozen is None:
            await self._keep()

    async def _keep(self) -> None:
        self.frozen = self._verifier.frozen(self._seq)
