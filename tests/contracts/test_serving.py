"""Deciders do not ask the folds of nodes, sagas, parameters and coefficients about the events of serving."""

from collections.abc import Callable
from typing import Any

import pytest

from services.controller import saga as saga_model
from services.controller.saga import Sagas
from shared.contracts.envelope import EventData, Stored
from shared.contracts.events import SERVING, EpochCommitted, ParametersChanged
from shared.model import cost as cost_model
from shared.model import parameters as parameters_model
from shared.model import pool as pool_model
from shared.model.cost import load_coefficients
from shared.model.keepsake import LASTING
from shared.model.parameters import Parameters
from shared.model.pool import Pool
from tests.contracts.examples import example

COEFFICIENTS = load_coefficients("qwen3_30b_a3b_h20")


def _pool_changes(stored: Stored) -> bool:
    pool = Pool()
    pool_model.evolve(pool, stored)
    return pool.changes > 0


def _saga_changes(stored: Stored) -> bool:
    sagas = Sagas()
    saga_model.evolve(sagas, stored, Pool())
    return sagas != Sagas()


CHANGES: dict[str, Callable[[Stored], bool]] = {
    "pool": _pool_changes,
    "sagas": _saga_changes,
    "parameters": lambda stored: parameters_model.evolve(Parameters(), stored) != Parameters(),
    "coefficients": lambda stored: cost_model.evolve(COEFFICIENTS, stored) is not COEFFICIENTS,
}


def _stored(cls: type[EventData], **fields: Any) -> Stored:
    event = example(cls)
    return Stored("a-log", 1, event.model_copy(update={"data": event.data.model_copy(update=fields)}))


@pytest.mark.parametrize("cls", sorted(SERVING, key=lambda each: each.TYPE), ids=lambda each: each.TYPE)
def test_no_other_fold_hears_an_event_of_serving(cls: type[EventData]) -> None:
    assert [name for name, changes in CHANGES.items() if changes(_stored(cls))] == []
    assert cls not in LASTING


def test_a_fold_that_hears_something_is_noticed() -> None:
    assert _pool_changes(_stored(EpochCommitted))
    assert _saga_changes(_stored(EpochCommitted))
    assert CHANGES["parameters"](_stored(ParametersChanged, changes={"beta": 3.5}))
