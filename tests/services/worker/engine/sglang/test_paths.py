"""Digests are SGLang's, and units that agree keep exactly what all of them have."""

import hashlib
import struct
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.sglang.page_hashes import page_hashes
from services.worker.engine.sglang.plugin.paths import (
    NOWHERE,
    OFFER_BYTES,
    PathLog,
    agree,
    block_hash,
    offer,
    path_of,
)

PAGE = 2
KEYS = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


def log_of(keys: list[list[int]]) -> PathLog:
    log = PathLog(PAGE, tokens_max=1000)
    for key in keys:
        log.add(NOWHERE, array("I", key))
    return log


def pages(log: PathLog) -> set[bytes]:
    return {digest[:OFFER_BYTES] for path in log.paths for digest in path.digests}


def test_a_digest_by_hand() -> None:
    path = path_of(NOWHERE, array("I", [1, 2, 3, 4, 5]), 2)
    first = hashlib.sha256(struct.pack("<II", 1, 2)).digest()
    assert path.digests == (first, hashlib.sha256(first + struct.pack("<II", 3, 4)).digest())
    assert path.tokens.tolist() == [1, 2, 3, 4]
    assert block_hash(first) == struct.unpack(">q", first[:8])[0]


def test_namespaces_are_apart() -> None:
    tokens = array("I", [1, 2])
    chains = [path_of(each, tokens, 2).digests for each in (NOWHERE, ("lora", None), (None, "lora"))]
    assert len(set(chains)) == 3


def test_agents_and_units_name_a_salted_page_alike() -> None:
    """An agent asks for pages to be taken out by the names that events gave them."""
    tokens = np.arange(40, dtype=np.uint32)
    path = path_of((None, "salt"), array("I", tokens.tolist()), 16)
    assert [block_hash(digest) for digest in path.digests] == page_hashes(tokens, 16, "salt")


@given(KEYS)
def test_the_log_holds_every_page_once_under_its_longest_path(keys: list[list[int]]) -> None:
    log = log_of(keys)
    expected = {digest[:OFFER_BYTES] for key in keys for digest in path_of(NOWHERE, array("I", key), PAGE).digests}
    assert pages(log) == expected
    again = [key[: len(key) - len(key) % PAGE] for key in keys]
    last = next((key for key in reversed(again) if key), None)
    assert last is None or log.paths[-1].tokens.tolist() == last


@given(KEYS, st.integers(1, 4), st.integers(1, 12))
def test_the_log_is_bounded_and_forgets_the_oldest(keys: list[list[int]], paths_max: int, tokens_max: int) -> None:
    log = PathLog(PAGE, tokens_max, paths_max)
    for key in keys:
        log.add(NOWHERE, array("I", key))
        assert len(log) <= paths_max
        assert sum(len(path.tokens) for path in log.paths) <= max(tokens_max, 8)
    whole = log_of(keys)
    assert [path for path in whole.paths if path in log.paths] == list(log.paths)


@given(st.lists(KEYS, min_size=2, max_size=4))
def test_what_is_agreed_is_what_all_have(units: list[list[list[int]]]) -> None:
    logs = [log_of(keys) for keys in units]
    offers = {unit: offer(log.paths) for unit, log in enumerate(logs)}
    kept = agree(offers, 0)
    assert len(set(kept)) == len(kept)
    chains = {
        digest[:OFFER_BYTES]: path.digests[: index + 1]
        for path in logs[0].paths
        for index, digest in enumerate(path.digests)
    }
    covered = {digest[:OFFER_BYTES] for last in kept for digest in chains[last]}
    assert covered == set.intersection(*map(pages, logs))
