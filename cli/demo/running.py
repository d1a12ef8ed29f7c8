"""What is done with a half's system: send its requests, audit its record, compare its answers with transformers."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from cli.demo.halves import Half
from cli.embedded.data_dir import RunningSystem
from cli.embedded.moving import Moved, move, pin
from cli.trace.measuring import OK, Outcome, Report
from cli.trace.prompts import prompt_tokens
from cli.trace.sending import Target, first_model, send
from services.ledger.audit import Audit, audit
from shared.contracts.events.requests import RequestCompleted
from shared.contracts.ids import NodeId
from shared.runtime.clock import SystemClock
from simulation.workloads.rows import Row

SETTLE_S = 30.0
"""The ledger is at most this far behind when the last answer has come."""

SETTLE_POLL_S = 0.5

FIRST_NODE = NodeId("n0")
"""As the embedded system names it."""

RECHECK_SILENCE_S = 300.0
"""Importing transformers and one answer of 512 tokens, on a machine that has little time for either."""

Answers = list[tuple[Row, Outcome]]
Verdict = Counter[str]
"""`answers`, `positions`, `equal`, `within_gap` and `mismatches` (`services.worker.engine.torch.recheck`)."""


class Ran(NamedTuple):
    """What one half showed. Times in `report` are of the clients' clock; without tensors there is no `verdict`."""

    half: Half
    report: Report
    audit: Audit
    verdict: Verdict | None
    moved: Sequence[Moved] = ()


class DemoFailed(Exception):
    """A half did not do what it must. The message says what."""


async def served(
    half: Half, rows: list[Row], system: RunningSystem, on_outcome: Callable[[Row, Outcome], None]
) -> Report:
    """Send every row to `system` and report. Errors: NoServer."""
    model = await first_model(system.api_url)
    target = Target(system.api_url, model, concurrency=half.concurrency, objective=half, token_ids=True)
    return await send(rows, target, SystemClock(), on_outcome)


async def served_and_moved(
    half: Half, rows: list[Row], system: RunningSystem, on_outcome: Callable[[Row, Outcome], None]
) -> tuple[Report, list[Moved]]:
    """The same, reconfigured on the way as the half says. Errors: NoServer, NotMoved."""
    due = [asyncio.Event() for _ in half.moves]
    answered = 0

    def ended(row: Row, outcome: Outcome) -> None:
        nonlocal answered
        answered += 1
        for number, event in enumerate(due, start=1):
            if answered >= number * len(rows) // (len(due) + 1):
                event.set()
        on_outcome(row, outcome)

    moving = asyncio.create_task(_moved(half, system, due))
    try:
        return await served(half, rows, system, ended), await moving
    finally:
        moving.cancel()


async def _moved(half: Half, system: RunningSystem, due: list[asyncio.Event]) -> list[Moved]:
    moved: list[Moved] = []
    if half.moves:
        # What the half shows of this node are its own moves; policies move what it leaves to them.
        await pin(system, FIRST_NODE, "demo", SystemClock())
    for composition, event in zip(half.moves, due, strict=True):
        await event.wait()
        moved.append(await move(system, FIRST_NODE, composition, "demo", SystemClock()))
    return moved


async def settled_audit(database_url: str, answered: int) -> Audit:
    """The audit once the ledger has copied the ends of the answered requests. What is still open then is a violation.

    Errors: DemoFailed.
    """
    clock = SystemClock()
    deadline_ns = clock.monotonic_ns() + round(SETTLE_S * 1e9)
    while True:
        found = await audit(database_url, settled=True)
        completed, late = found.by_end[RequestCompleted.TYPE], clock.monotonic_ns() > deadline_ns
        # Requests refused at the door are counted there and are not on the record one by one.
        if completed >= answered and (late or not found.open_requests):
            return found
        if late:
            raise DemoFailed(
                f"{SETTLE_S:.0f} s after the last answer the record has {completed:,} completed requests; "
                f"{answered:,} were answered"
            )
        await clock.sleep(SETTLE_POLL_S)


async def compared(model_dir: Path, answers: Answers, on_verdict: Callable[[Verdict], None]) -> Verdict:
    """Every greedy answer against transformers on the same weights; `on_verdict` sees the sum so far. Errors: DemoFailed."""
    command = (sys.executable, "-P", "-m", "services.worker.engine.torch.recheck", str(model_dir))
    # A session of its own: Ctrl-C is ours to handle.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said = asyncio.ensure_future(process.stderr.read())
    try:
        process.stdin.write(b"".join(_line(row, outcome) for row, outcome in answers if outcome.kind == OK))
        process.stdin.close()
        verdict = Verdict()
        while line := await asyncio.wait_for(process.stdout.readline(), RECHECK_SILENCE_S):
            verdict.update(orjson.loads(line))
            on_verdict(verdict)
        status = await process.wait()
    except TimeoutError as error:
        raise DemoFailed(f"transformers compared nothing for {RECHECK_SILENCE_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
        last_words = (await said).decode(errors="replace")[-500:]
    if status:
        raise DemoFailed(f"the comparison with transformers ended with status {status}: {last_words}")
    return verdict


def _line(row: Row, outcome: Outcome) -> bytes:
    document = {"prompt": prompt_tokens(row).tolist(), "output": outcome.token_ids}
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
