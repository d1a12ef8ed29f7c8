"""KV events: names of pages, messages as they come, and what a unit holds by them."""

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.protocol import PrefillItem
from services.worker.engine.sglang.kv_messages import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BadMessage,
    BlockRemoved,
    BlockStored,
    Event,
    Message,
    parse,
)
from services.worker.engine.sglang.page_hashes import page_hashes, salt_of
from services.worker.engine.sglang.unit_cache import UnitCache
from tests.services.worker.engine.sglang.recordings import PAGE, event_frames, item, prompt

# --- names


def test_pages_have_the_names_that_a_server_gave_them() -> None:
    asked = [item("a", 83), item("g", 3000, 1), item("h", 3000, 2)]
    stored = [
        event.block_hashes
        for frames in event_frames()
        for event in parse(frames).events
        if isinstance(event, BlockStored)
    ]
    assert [page_hashes(each.tokens, PAGE, salt_of(each.request, each.chain)) for each in asked] == stored


def test_without_a_salt_a_name_is_the_digest_of_tokens_alone() -> None:
    """SHA-256 of 0, 1, 2, 3 as u32, computed with `sha256sum`."""
    tokens = np.arange(4, dtype=np.uint32)
    assert page_hashes(tokens, 4, None) == [int.from_bytes(bytes.fromhex("baed642339816aff"), "big", signed=True)]


@given(st.integers(0, 130), st.integers(4, 40), st.sampled_from([None, "a", "b"]))
def test_a_longer_prompt_begins_with_the_names_of_a_shorter_one(length: int, page: int, salt: str | None) -> None:
    tokens = prompt(130)
    names = page_hashes(tokens[:length], page, salt)
    assert len(names) == length // page
    assert names == page_hashes(tokens, page, salt)[: len(names)]
    assert not set(names) & set(page_hashes(tokens, page, "another"))


def test_prompts_share_a_salt_exactly_if_they_share_a_block() -> None:
    salts = [_salt(item("a", 40)), _salt(item("b", 80)), _salt(item("c", 40, seed=1)), _salt(item("d", PAGE - 1))]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert _salt(item("e", PAGE - 1)) not in salts, "what answers fill up to a page is one request's alone"


def _salt(item: PrefillItem) -> str:
    return salt_of(item.request, item.chain)


# --- messages


def test_recorded_messages_are_read() -> None:
    messages = [parse(frames) for frames in event_frames()]
    assert [each.sequence - messages[0].sequence for each in messages] == [0, 1, 2, 3]
    kinds = [[type(event).__name__ for event in each.events] for each in messages]
    assert kinds == [["BlockStored"], ["BlockStored"], ["BlockRemoved", "BlockStored"], ["AllBlocksCleared"]]


def test_the_end_of_a_replay_has_no_events() -> None:
    assert parse([b"", (END_OF_REPLAY).to_bytes(8, "big", signed=True), b""]) == Message(END_OF_REPLAY, [])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"x"],
        [b"", b"short", b""],
        [b"", bytes(8), b"no msgpack"],
        [b"", bytes(8), msgspec.msgpack.encode([0.0, [{"type": "Unheard"}]])],
        [b"", bytes(8), msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": "x"}]])],
        [b"", bytes(8), b"", b""],
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadMessage):
        parse(frames)


@given(st.binary(max_size=64))
def test_no_bytes_break_the_parser(payload: bytes) -> None:
    try:
        parse([b"", bytes(8), payload])
    except BadMessage:
        return


# --- a unit


def stored(*pages: int, medium: str | None = "GPU") -> BlockStored:
    return BlockStored(list(pages), None, PAGE, medium)


def removed(*pages: int) -> BlockRemoved:
    return BlockRemoved(list(pages), "GPU")


def folded(*batches: Sequence[Event]) -> UnitCache:
    unit = UnitCache()
    for sequence, events in enumerate(batches):
        unit.fold(Message(sequence, list(events)))
    return unit


def test_a_recorded_life_of_a_unit() -> None:
    unit, held = UnitCache(), []
    for frames in event_frames():
        unit.fold(parse(frames))
        held.append(len(unit.held))
    assert held == [5, 5 + 187, 187, 0]
    assert unit.clears == 1
    assert len(unit.gone) == 5 + 187 + 187


def test_a_merge_is_a_resync() -> None:
    unit = folded([stored(1, 2, 3)], [AllBlocksCleared(), stored(1, 2)])
    assert (unit.held, unit.gone, unit.clears) == ({1, 2}, {1, 2, 3}, 1)


def test_what_lies_in_host_memory_is_not_held() -> None:
    unit = folded([stored(1, 2)], [removed(2), stored(2, medium="CPU_PINNED")])
    assert unit.held == {1}
    unit.fold(Message(2, [BlockRemoved([1], "CPU_PINNED")]))
    assert unit.held == {1}


def test_a_gap_that_nobody_fills_empties_the_unit() -> None:
    unit = folded([stored(1, 2)])
    late = Message(3, [stored(3)])
    assert unit.missing(late) == 1
    unit.fold(late)
    assert (unit.held, unit.gone, unit.gaps) == ({3}, {1, 2}, 1)
    assert unit.missing(Message(4, [])) is None


def test_who_joins_late_begins_with_what_is_sent() -> None:
    unit = UnitCache()
    unit.fold(Message(90, [stored(1)]))
    assert (unit.held, unit.gaps, unit.next_sequence) == ({1}, 0, 91)


def test_a_prefill_proves_its_pages_but_those_that_left_meanwhile() -> None:
    unit = folded([stored(1)])
    watcher = unit.watch()
    unit.fold(Message(1, [stored(1, 2, 3)]))
    unit.fold(Message(2, [removed(3)]))
    unit.confirm(watcher, [1, 2, 3, 4])
    assert unit.held == {1, 2, 4}
    unit.fold(Message(3, [removed(4)]))
    assert unit.held == {1, 2}


def test_a_prefill_proves_nothing_if_removals_may_have_been_lost_meanwhile() -> None:
    unit = folded([stored(1)])
    before = unit.watch()
    unit.fold(Message(9, []))
    unit.confirm(before, [1, 2])
    assert unit.held == set()
    unit.confirm(unit.watch(), [1, 2])
    assert unit.held == {1, 2}


EVENTS = st.one_of(
    st.builds(lambda pages: stored(*pages), st.lists(st.integers(0, 9), max_size=4)),
    st.builds(lambda pages: removed(*pages), st.lists(st.integers(0, 9), max_size=4)),
    st.just(AllBlocksCleared()),
)


@given(st.lists(st.lists(EVENTS, max_size=3), max_size=20), st.randoms(use_true_random=False))
def test_repeats_change_nothing(batches: list[list[Event]], chance: random.Random) -> None:
    """A replay overlaps with what comes live: whatever is sent twice, the unit is as if all had come once."""
    once, again = folded(*batches), UnitCache()
    for sequence in range(len(batches)):
        for earlier in range(chance.randint(0, sequence), sequence + 1):
            again.fold(Message(earlier, batches[earlier]))
    assert (again.held, again.gone, again.next_sequence) == (once.held, once.gone, once.next_sequence)
