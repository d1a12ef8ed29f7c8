"""Caches that this router does not know exactly, although others may: it asks their agents for full reports.

An ordinary gap is everybody's, and the cache manager has it mended. But a router that starts on a log whose beginning was
dropped is `blind` for workers that are older, while the cache manager has known them all along.
"""

from typing import NoReturn

from services.router.decider import State
from shared.model.holders import in_doubt
from shared.runtime.reports import ASK_EVERY_S, ask_for_reports
from shared.runtime.service import Runtime


async def end_doubts(state: State, runtime: Runtime) -> NoReturn:
    """Until cancelled. Asks at once about what is in doubt at the start, later about what nobody else has had mended between
    two looks. `state` is the projection's, caught up."""
    before = set(state.holders.workers)
    while True:
        doubtful = in_doubt(state.holders, state.pool.alive)
        lasting = {node: still for node, workers in doubtful.items() if (still := before.intersection(workers))}
        await ask_for_reports(runtime.bus, runtime.subjects, lasting)
        before = {worker for workers in doubtful.values() for worker in workers}
        await runtime.clock.sleep(ASK_EVERY_S)
