"""One decision, whatever the order and whoever comes late, over a real store."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore

from services.worker.engine.sglang.plugin import store as stores
from services.worker.engine.sglang.plugin.ballot import Ballot, Decision, pack, unpack

VOTERS = (0, 1, 2, 3)
LONG_S = 60.0


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return stores.serve(lambda *_: None)


EPOCHS = count(1)


def keys(store: TCPStore, epoch: int) -> int:
    names = [f"vertumnus/{epoch}/{name}" for name in ("decision", "done", *(f"vote/{rank}" for rank in VOTERS))]
    return sum(store.check([name]) for name in names)


@given(st.lists(st.binary(max_size=40)))
def test_parts_come_out_as_they_went_in(parts: list[bytes]) -> None:
    assert unpack(pack(parts)) == parts


def test_all_say_yes(store: TCPStore) -> None:
    epoch, barrier = next(EPOCHS), Barrier(len(VOTERS))

    def run(rank: int) -> tuple[Decision, dict[int, list[bytes]] | None]:
        mine = TCPStore(stores.LOOPBACK, store.port, is_master=False)
        ballot = Ballot(mine, epoch, VOTERS)
        barrier.wait()
        ballot.vote(rank, [bytes([rank]), b""])
        offers = ballot.votes(LONG_S)
        decision = ballot.decide(Decision.ABORT if offers is None else Decision.COMMIT)
        ballot.done()
        return decision, offers

    with ThreadPoolExecutor(len(VOTERS)) as threads:
        results = list(threads.map(run, VOTERS))
    expected = {rank: [bytes([rank]), b""] for rank in VOTERS}
    assert results == [(Decision.COMMIT, expected)] * len(VOTERS)
    assert keys(store, epoch) > 0, "the controller has not read yet"
    controller = Ballot(store, epoch, VOTERS)
    assert controller.decide(Decision.ABORT) is Decision.COMMIT
    controller.done()
    assert keys(store, epoch) == 0


def test_one_says_no(store: TCPStore) -> None:
    epoch = next(EPOCHS)
    ballots = {rank: Ballot(store, epoch, VOTERS) for rank in VOTERS}
    for rank, ballot in ballots.items():
        ballot.vote(rank, None if rank == 2 else [])
    assert all(ballot.votes(LONG_S) is None for ballot in ballots.values())
    assert {ballot.decide(Decision.ABORT) for ballot in ballots.values()} == {Decision.ABORT}


def test_who_wakes_late_reads_what_was_decided_without_it(store: TCPStore) -> None:
    epoch = next(EPOCHS)
    for rank in (0, 1, 3):
        ballot = Ballot(store, epoch, VOTERS)
        ballot.vote(rank, [])
        assert ballot.votes(0.01) is None
        assert ballot.decide(Decision.ABORT) is Decision.ABORT
        ballot.done()
    controller = Ballot(store, epoch, VOTERS)
    assert controller.decide(Decision.ABORT) is Decision.ABORT
    controller.done()
    late = Ballot(store, epoch, VOTERS)
    late.vote(2, [])
    assert late.votes(LONG_S) is not None, "by now all have voted yes"
    assert late.decide(Decision.COMMIT) is Decision.ABORT
    late.done()
    assert keys(store, epoch) == 0


def test_a_controller_that_gives_up_first_is_followed(store: TCPStore) -> None:
    epoch = next(EPOCHS)
    assert Ballot(store, epoch, VOTERS).decide(Decision.ABORT) is Decision.ABORT
    ballot = Ballot(store, epoch, VOTERS)
    assert ballot.decide(Decision.COMMIT) is Decision.ABORT


def test_voters_that_race_decide_alike(store: TCPStore) -> None:
    for _ in range(40):
        epoch, barrier = next(EPOCHS), Barrier(2)

        def run(proposal: Decision, epoch: int = epoch, barrier: Barrier = barrier) -> Decision:
            mine = TCPStore(stores.LOOPBACK, store.port, is_master=False)
            barrier.wait()
            return Ballot(mine, epoch, VOTERS).decide(proposal)

        with ThreadPoolExecutor(2) as threads:
            assert len(set(threads.map(run, (Decision.COMMIT, Decision.ABORT)))) == 1
