"""Whatever the schemas let through, every service folds it and lives: one event would end each of them, at each start anew."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cachemgr import decider as cachemgr
from services.controller import decider as controller
from services.router import decider as router
from services.worker import decider as worker
from shared.contracts.codec import decode, encode
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.ids import NodeId, Source
from shared.model.cost import load_coefficients
from tests.contracts.examples import ALL
from tests.contracts.strategies import FEW_IDS, Values

COST = load_coefficients("qwen3_30b_a3b_h20")
FOLDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Stored], None]]] = {
    "router": (lambda: router.initial(COST), router.evolve),
    "controller": (controller.initial, controller.evolve),
    "cachemgr": (lambda: cachemgr.initial(COST), cachemgr.evolve),
    "worker": (lambda: worker.initial(NodeId("n0"), 4), worker.evolve),
}
FACTS = st.lists(st.one_of(*(Values(FEW_IDS, few=True).models(cls) for _, cls in ALL)), min_size=5, max_size=40)


def stored(seq: int, fact: EventData) -> Stored:
    """As every service reads it: out of the bytes."""
    event = Envelope(
        id=UUID(int=seq),
        type=fact.TYPE,
        version=fact.VERSION,
        pool="main",
        source=Source("r1" if seq % 2 else "r2"),
        source_seq=seq,
        time_ns=seq * 10**9,
        data=fact,
    )
    return Stored("log", seq, decode(encode(event)))


@pytest.mark.parametrize("name", FOLDS)
@given(facts=FACTS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
def test_nonsense_in_the_right_form_is_folded(name: str, facts: list[EventData]) -> None:
    initial, evolve = FOLDS[name]
    state = initial()
    for seq, fact in enumerate(facts, 1):
        evolve(state, stored(seq, fact))
