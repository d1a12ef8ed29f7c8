"""What a router credits to a cache, when events of it are dropped, doubled and put out of order on their way.

The worker is modelled by what it holds after each of its numbered events. A router that has been told of a gap, by any later
event, must not credit a block that the worker did not hold then; and no decision may credit what its trust does not allow.
"""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from router_world import AGENT, ME, NOW_NS, Log, arrival, blocks, pool_of, registered

from services.router.decider import Moment, receive
from shared.contracts.envelope import EventData
from shared.contracts.events import (
    BlockRun,
    BlocksEvicted,
    BlocksStored,
    CacheReported,
    ParametersChanged,
    PricedCandidate,
    RequestAssigned,
)
from shared.contracts.ids import WorkerId

WORKER = WorkerId("n0/1/0")
CHAIN = blocks(12)


class Told(NamedTuple):
    """An event of the worker, and how many blocks of the chain it held after it."""

    event: EventData
    held: int


def history(lengths: list[int]) -> list[Told]:
    """A worker whose cached prefix grows and shrinks to each of these lengths in turn."""
    told, held, number = [], 0, 0
    for length in lengths:
        number += length != held
        if length > held:
            parent = CHAIN[held - 1] if held else None
            runs = (BlockRun(parent=parent, block_ids=b"".join(CHAIN[held:length])),)
            stored = {"worker": WORKER, "incarnation": 1, "number": number, "cause": "replication"}
            told.append(Told(BlocksStored(**stored, blocks=length - held, runs=runs), length))
        elif length < held:
            gone = b"".join(reversed(CHAIN[length:held]))
            event = BlocksEvicted(worker=WORKER, incarnation=1, number=number, cause="pressure", block_ids=gone)
            told.append(Told(event, length))
        held = length
    return told


def report(number: int, held: int) -> CacheReported:
    runs = (BlockRun(parent=None, block_ids=b"".join(CHAIN[:held])),) if held else ()
    return CacheReported(worker=WORKER, incarnation=1, number=number, part=1, parts=1, runs=runs)


def decided(log: Log, request: str) -> PricedCandidate:
    facts = receive(log.state, arrival(request, 1_300), Moment(NOW_NS, log.seq))
    assert isinstance(facts[-1], RequestAssigned)
    return facts[-1].candidates[0]


def pool(policy: str) -> Log:
    log = Log()
    changes = {"placement_policy": policy}
    log.fold(*pool_of(4), ParametersChanged(parameters_version=1, changes=changes, asked_by="t"))
    return log


LENGTHS = st.lists(st.integers(0, len(CHAIN)), min_size=1, max_size=12)
FAULTS = st.lists(st.sampled_from(["drop", "double", "swap", "pass", "pass"]), min_size=12, max_size=12)


@given(LENGTHS, FAULTS, st.sampled_from(["paper", "vertumnus"]))
def test_no_fault_on_the_way_leaves_credit_that_the_worker_does_not_back(
    lengths: list[int], faults: list[str], policy: str
) -> None:
    told = history(lengths)
    arriving: list[Told] = []
    for each, fault in zip(told, faults, strict=False):
        if fault != "drop":
            arriving += [each] * (2 if fault == "double" else 1)
        if fault == "swap" and len(arriving) > 1:
            arriving[-1], arriving[-2] = arriving[-2], arriving[-1]
    log = pool(policy)
    for number, each in enumerate(arriving):
        log.fold(each.event)
        found = decided(log, f"r{number}")
        if found.trust == "exact":
            assert found.cached_tokens == 100 * min(each.held, 12)
        else:
            assert found.cached_tokens <= 100 * each.held, "what was known before a gap counts no longer"
    # A report mends it, whatever came before.
    last = told[-1].held if told else 0
    log.fold(report(len(told), last))
    found = decided(log, "end")
    assert (found.trust, found.cached_tokens) == ("exact", 100 * last)
    log.state.holders.check()


@given(LENGTHS)
def test_a_restart_leaves_nothing(lengths: list[int]) -> None:
    """Nor does what its requests would have left: they went with it."""
    log = pool("vertumnus")
    log.fold(*(each.event for each in history(lengths)))
    log.fold(*receive(log.state, arrival("open", 1_300), Moment(NOW_NS, log.seq)), source=ME)
    log.fold(registered("n0", 4, incarnation=2, epoch=1, composition=(4,)), source=AGENT)
    found = decided(log, "r1")
    assert (found.cached_tokens, found.in_flight_tokens) == (0, 0)
    assert not log.state.loads.in_flight
