"""One pool, its caches changed over and over while managers, agents and the log's server come and go.

The long ones: `python -m simulation.faults.caches --operations 100000`.
"""

from typing import Any

import pytest

from services.cachemgr import hosting, keeper
from services.cachemgr.freezing import Folded
from services.cachemgr.keeper import Kept
from services.worker import cache_events
from services.worker.engine.copy_plan import Evicted
from shared.contracts.envelope import EventData
from simulation.faults.caches import chapter, tell


def test_every_trie_is_the_union_of_the_workers_indexes_at_every_point_of_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a manager that was killed and has gone on from a snapshot."""
    resumed: list[int] = []

    async def resume(kept: Kept) -> Folded | None:
        if (folded := await keeper.resume(kept)) is not None:
            resumed.append(folded.reached.seen_seq)
        return folded

    monkeypatch.setattr(hosting, "resume", resume)
    verdict, counting = tell(5, 250)
    assert verdict.violations == ()
    assert counting.rests >= 2
    assert verdict.types["replica-installed"] > 0
    assert verdict.types["replica-reclaimed"] > 0
    assert resumed


def test_an_eviction_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told = cache_events.reclaimed

    def forgets_one(worker: Any, incarnation: int, number: int, gone: Evicted) -> list[EventData]:
        return told(worker, incarnation, number, Evicted(gone.freed[:-1], gone.kept, gone.evicted))

    monkeypatch.setattr(cache_events, "reclaimed", forgets_one)
    verdict, _ = tell(3, 250)
    assert any("blocks of" in each for each in verdict.violations), verdict.violations


def test_a_chapter_is_the_same_whoever_draws_it() -> None:
    assert chapter(5, 7) == chapter(5, 7) != chapter(5, 8)
