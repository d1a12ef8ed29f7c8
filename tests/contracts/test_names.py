"""Ids and subjects."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.envelope import Channel
from shared.contracts.ids import (
    BlockId,
    NodeId,
    RequestId,
    RouterId,
    check_token,
    decode_worker_id,
    epoch_of,
    node_of,
    unpack_block_ids,
    worker_id,
)
from shared.contracts.subjects import RULES, Subjects
from shared.runtime.memory import matches
from tests.contracts.examples import ALL


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_packed_ids_unpack(ids: list[bytes]) -> None:
    assert unpack_block_ids(b"".join(ids)) == [BlockId(each) for each in ids]


@pytest.mark.parametrize("length", [1, 15, 17, 33])
def test_packed_ids_of_a_wrong_length_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"block_ids: {length} bytes"):
        unpack_block_ids(bytes(length))


@given(st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True), st.integers(0, 10**6), st.integers(0, 63))
def test_a_worker_id_says_node_epoch_and_rank(node: str, epoch: int, rank: int) -> None:
    worker = worker_id(NodeId(node), epoch, rank)
    assert (node_of(worker), epoch_of(worker)) == (node, epoch)
    assert node_of(decode_worker_id(NodeId(node), rank)) == node


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "*", ">", "ä", "x" * 65, "a\n"])
def test_what_may_not_stand_in_a_subject_is_refused_by_name(bad: str) -> None:
    with pytest.raises(ValueError, match=r"^pool: .* must be 1-64 letters"):
        check_token("pool", bad)
    with pytest.raises(ValueError, match=r"^pool: "):
        Subjects(bad)


def test_every_subject_is_in_the_table_once() -> None:
    subjects = Subjects("p")
    node, router, request = NodeId("n0"), RouterId("r1"), RequestId("q1")
    made = [
        *(subjects.event(channel, "sender") for channel in Channel),
        subjects.load(node),
        subjects.alive(router),
        subjects.claim(router),
        subjects.frames(router, request),
        subjects.agent(node),
    ]
    patterns = [f"{subjects.root}.{re.sub('<[a-z]+>', '*', rule.pattern)}" for rule in RULES]
    for subject in made:
        assert [matches(pattern, subject) for pattern in patterns].count(True) == 1, subject
    assert len(made) == len(RULES), "a rule for a subject that nothing makes, or a subject without a rule"
    logged = [rule.logged for rule in RULES]
    assert [matches(subjects.all_events, subject) for subject in made].count(True) == logged.count(True)


def test_filters_match_what_they_are_for() -> None:
    subjects = Subjects("p")
    for channel in Channel:
        assert matches(subjects.channel(channel), subjects.event(channel, "sender"))
    assert matches(subjects.loads, subjects.load(NodeId("n0")))
    assert matches(subjects.routers_alive, subjects.alive(RouterId("r1")))
    assert matches(subjects.all_frames(RouterId("r1")), subjects.frames(RouterId("r1"), RequestId("q")))
    assert not matches(subjects.all_events, Subjects("q").control)


def test_only_a_sender_named_in_the_table_sends_a_type() -> None:
    publishers = {rule.pattern.split(".")[1]: rule.publishers.split(", ") for rule in RULES if rule.logged}
    for (tag, _), cls in ALL:
        assert set(cls.SENDERS) <= set(publishers[cls.CHANNEL]), tag
