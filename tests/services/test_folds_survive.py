"""Whatever the schemas let through, every service folds it and lives: one event would end each of them, at each start anew."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.cachemgr import decider as cachemgr
from services.controller import decider as controller
from services.router import decider as router
from services.worker import decider as worker
from shared.contracts.codec import decode, encode
from shared.contracts.envelope import Envelope, EventData, Stored
from shared.contracts.events import (
    BlockRun,
    BlocksStored,
    ParametersChanged,
    ReclamationRequested,
    ReplicationRequested,
)
from shared.contracts.ids import NodeId, Source, WorkerId
from shared.model.cost import load_coefficients
from tests.contracts.examples import ALL
from tests.contracts.strategies import FEW_IDS, Values
from tests.support.story import serving

COST = load_coefficients("qwen3_30b_a3b_h20")
W, OTHER = WorkerId("n0/1/0"), WorkerId("n0/1/1")
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


@given(facts=FACTS, policy=st.sampled_from(["paper", "regret"]))
@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
def test_a_cache_manager_decides_on_nonsense_in_the_right_form(facts: list[EventData], policy: str) -> None:
    """By any rules; else what it has folded would end it again at each start."""
    state = cachemgr.initial(COST, derives=True)
    cachemgr.evolve(
        state, stored(1, ParametersChanged(parameters_version=1, changes={"cache_policy": policy}, asked_by="x"))
    )
    for seq, fact in enumerate(facts, 2):
        cachemgr.evolve(state, stored(seq, fact))
        for rules in (1, 2, 3):
            cachemgr.scan(state, rules)
        cachemgr.orders(state)
        cachemgr.settle(state, seq * 10**9, {})
        cachemgr.reconcile_placements(state)
    state.trie.check(state.holders)


def test_an_operation_on_a_path_that_is_shorter_than_it_says_is_scanned_past() -> None:
    state, z = cachemgr.initial(COST), bytes(16)
    run = BlockRun(block_ids=z)
    for seq, fact in enumerate(
        (
            *serving("n0", (1, 1)),
            ParametersChanged(parameters_version=1, changes={"cache_policy": "paper"}, asked_by="x"),
            BlocksStored(worker=W, incarnation=1, number=1, cause="replication", blocks=1, runs=(run,)),
            ReplicationRequested(
                operation="copy", z=z, degree=1, kind="inter", sources=(W,), destination=OTHER, first_depth=9,
                blocks=1 << 32, score=1.0,
            ),
            ReclamationRequested(operation="gone", z=z, worker=W, blocks=1 << 32, score=1.0),
        ),
        1,
    ):  # fmt: skip
        cachemgr.evolve(state, stored(seq, fact))
    assert cachemgr.scan(state)
    assert cachemgr.orders(state).keys() == {"gone"}
    for blocks in (-1, 1 << 64):
        with pytest.raises(ValidationError):
            ReclamationRequested(operation="gone", z=z, worker=W, blocks=blocks, score=1.0)
