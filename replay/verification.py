"""The whole record verified, in as many processes as it is worth, on one view of the database."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any, NamedTuple

from replay import history
from replay.findings import Findings
from replay.parts import Part, jobs_for, parts
from replay.verifying import EVERYTHING, LogVerifier, Span
from services.ledger import database, reading
from services.ledger.reading import LogInfo
from shared.contracts.envelope import Stored

Progress = Callable[[int], None]


class Verification(NamedTuple):
    """What was read and what was found."""

    logs: int
    events: int
    findings: Findings

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


async def verify(
    database_url: str,
    span: Span = EVERYTHING,
    *,
    deep: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Verify the record as of now, while others go on writing. Sequences in `span` are those of the newest log. `jobs`: how
    many processes; None for what the record is worth.

    `progress` is told how many events have been folded. Errors: those of `database.connect`.
    """
    connection = await database.connect(database_url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            logs = await reading.logs(connection)
            [own, *others] = parts(jobs or jobs_for(sum(log.stream_seq for log in logs)))
            view = await connection.fetchval("SELECT pg_export_snapshot()")
            with ExitStack() as stack:
                processes = None
                if others:
                    pool = ProcessPoolExecutor(len(others), mp_context=get_context("spawn"))
                    processes = stack.enter_context(pool)
                loop = asyncio.get_running_loop()
                asked = [_Asked(database_url, view, span, deep, part) for part in others]
                found = [loop.run_in_executor(processes, _elsewhere, each) for each in asked]
                first = await _part(connection, logs, _Asked(database_url, view, span, deep, own), progress)
                rest = await asyncio.gather(*found)
    finally:
        await connection.close()
    return first._replace(findings=Findings.together([each.findings for each in (first, *rest)]))


def _elsewhere(asked: _Asked) -> Verification:
    """In a process of its own."""
    return asyncio.run(_on_view(asked))


async def _on_view(asked: _Asked) -> Verification:
    connection = await database.connect(asked.database_url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(f"SET TRANSACTION SNAPSHOT '{asked.view}'")
            return await _part(connection, await reading.logs(connection), asked, None)
    finally:
        await connection.close()


async def _part(connection: Any, logs: list[LogInfo], asked: _Asked, progress: Progress | None) -> Verification:
    findings, events, inherited = Findings(), 0, list[Stored]()
    for log in logs:
        span = asked.span if log is logs[-1] else asked.span.in_older_log()
        begun = await history.registrations(connection, log.log)
        verifier = LogVerifier(
            str(log.log), begun, span, findings, inherited=inherited, deep=asked.deep, part=asked.part
        )
        missing = await history.holes(connection, log, verifier)
        async for page in history.pages(connection, log, missing):
            for stored in page:
                verifier.fold(stored)
            events += len(page)
            if progress is not None:
                progress(events)
        verifier.end()
        inherited = verifier.past.legacy()
    return Verification(len(logs), events, findings)
