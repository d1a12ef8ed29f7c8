"""What a policy decided comes out again from the log; decided by another rule, it does not."""

from collections.abc import Callable
from typing import Any

import pytest
from test_driving import overloaded, pool_of

from services.controller import paper_policy, reconfiguring, saga, signals
from shared.contracts.events import EpochCommitted, ReconfigurationPlanned
from tests.replay.test_verifying import verified


async def test_windows_plans_and_epochs_come_out_again() -> None:
    pool = await pool_of()
    await overloaded(pool, 4)
    assert [each.window for each in pool.all(ReconfigurationPlanned)] == [3]
    assert [len(each.workers) for each in pool.all(EpochCommitted)] == [2, 3]
    found = verified(pool.log_of)
    assert found.differences == []
    for kind in ("window-closed", "reconfiguration-planned", "drain-started", "epoch-committed"):
        assert found.checked[kind], kind


PLANTED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the worst step is taken": (paper_policy, "ranked", lambda real: lambda found: real(found)[::-1]),
    "a signal counts double": (
        signals,
        "after_window",
        lambda real: lambda window: real(window)._replace(persistence={"overload": 9}),
    ),
    "an epoch number is skipped": (
        reconfiguring.saga,
        "plan",
        lambda real: lambda *of: [each.model_copy(update={"epoch": each.epoch + 1}) for each in real(*of)],
    ),
    "a drain gets another limit": (
        saga,
        "_limit_us",
        lambda real: lambda step, parameters: real(step, parameters) + 1_000_000,
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
async def test_a_decision_by_another_rule_is_found(fault: str) -> None:
    where, name, wrap = PLANTED[fault]
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(where, name, wrap(getattr(where, name)))
        pool = await pool_of()
        await overloaded(pool, 4)
        assert pool.all(ReconfigurationPlanned)
    assert verified(pool.log_of).differences, fault


async def test_a_plan_that_the_record_cannot_explain_is_found() -> None:
    pool = await pool_of()
    await overloaded(pool, 3)
    log = list(pool.log_of)
    [at] = [n for n, each in enumerate(log) if isinstance(each.data, ReconfigurationPlanned)]
    for change in ({"reason": "underload for 3 windows"}, {"window": 2}, {"alternatives": ()}):
        forged = log[at].data.model_copy(update=change)
        log[at] = log[at]._replace(event=log[at].event.model_copy(update={"data": forged}))
        assert [each.type for each in verified(log).differences][:1] == ["reconfiguration-planned"]
        log[at] = pool.log_of[at]
