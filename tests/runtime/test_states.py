"""What is frozen comes back as it was, and nothing else can come out of bytes."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import orjson
import pytest

from services.cachemgr import decider as cachemgr
from services.cachemgr.replication import Operations
from services.cachemgr.tips import Tips
from services.cachemgr.trie import Trie
from services.controller import decider as controller
from services.router import decider as router
from shared.contracts.envelope import Stored, UnknownEvent
from shared.contracts.events import RequestReceived
from shared.contracts.ids import BlockId, RequestId, TenantId, unpack_block_ids
from shared.model.holders import Holders
from shared.model.lattice import Group
from shared.model.pool import Pool
from shared.runtime.states import BadState, freeze, thaw
from tests.replay.lagging_world import COST, World

PACKAGES = ("shared", "services")


def again(value: Any) -> Any:
    return thaw(freeze(value), PACKAGES)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            7,
            -(2**63) + 1,
            0.1,
            "ä",
            b"\x00\xff",
            (1, (2, b"x")),
            [],
            [1, [2]],
            {1, 2},
            frozenset({(1, 2)}),
        ),
        *({"b": 1, "a": (2,)}, {(1, b"k"): {}}, OrderedDict(b=1, a=2), Counter("hello"), Group(2, 4)),
    ],
)
def test_plain_data_comes_back(value: Any) -> None:
    found = again(value)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert list(found) == list(value), "in its order"


def test_what_is_shared_is_shared_again_and_circles_close() -> None:
    shared: list[Any] = [1]
    circle: dict[str, Any] = {"one": shared, "other": shared}
    circle["self"] = circle
    found = again(circle)
    assert found["one"] is found["other"]
    assert found["self"] is found
    bounded = again(deque([1, 2], maxlen=2))
    bounded.append(3)
    assert list(bounded) == [2, 3]


@pytest.mark.parametrize("policy", ["paper", "vertumnus"])
def test_deciders_go_on_as_if_nothing_had_happened(policy: str) -> None:
    world = World(2, policy=policy)
    world.run(700)
    folded = [each for each in world.log if not isinstance(each.data, UnknownEvent)]
    states = [(router.initial(COST), cachemgr.initial(COST), controller.initial())]
    for half in (folded[: len(folded) // 2], folded[len(folded) // 2 :]):
        for stored in half:
            for routing, caching, controlling in states:
                router.evolve(routing, stored)
                cachemgr.evolve(caching, stored)
                if stored.data.CHANNEL != "cache":
                    controller.evolve(controlling, stored)
        states.append(again(states[0]))
    arrival = router.Arrival(RequestId("new"), TenantId("t"), "m", 2_000, 5, 0, False, _chain_of(folded))
    told = []
    for routing, caching, controlling in states:
        routing.loads.check()
        routing.holders.check()
        caching.trie.check(caching.holders)
        placed = router.receive(routing, arrival, router.Moment(world.now_ns, 7))
        told.append((placed, cachemgr.scan(caching), controller.close_window(controlling, world.now_ns + 10**12)))
    assert told[0] == told[1] == told[2]
    assert all(told[0]), "each of them decides something"


def _chain_of(log: Sequence[Stored]) -> tuple[BlockId, ...]:
    received = [each.data for each in log if isinstance(each.data, RequestReceived)]
    return tuple(unpack_block_ids(max((each.block_ids for each in received), key=len)))


def test_a_deep_chain_needs_no_stack() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    found, depth = again(deep), 0
    while found:
        found, depth = found[0], depth + 1
    assert depth == 100_000


class Undeclared:
    """No field of it would be compared with those of whoever reads it."""

    def __init__(self) -> None:
        self.one = 1


@pytest.mark.parametrize("value", [object(), print, float("inf"), 2**64, 1j, Undeclared()])
def test_what_is_no_plain_data_cannot_be_frozen(value: Any) -> None:
    with pytest.raises(TypeError):
        freeze([value])


def test_a_class_that_has_changed_makes_the_state_unreadable() -> None:
    document = orjson.loads(freeze(Group(2, 4)))
    [name] = document["classes"]

    def with_classes(change: Callable[[dict[str, Any]], None]) -> bytes:
        changed = deepcopy(document)
        change(changed["classes"])
        return orjson.dumps(changed)

    with pytest.raises(BadState, match=r"Group: it has the fields .* and had \['first'\]"):
        thaw(with_classes(lambda classes: classes.update({name: ["first"]})), PACKAGES)
    for other in ("os:system", "subprocess:Popen", "sharedness:X"):
        with pytest.raises(BadState, match="no class of a state"):
            thaw(with_classes(lambda classes, other=other: classes.update({other: None})), PACKAGES)  # type: ignore[misc]
    for other in ("shared.model.lattice:Gone", "shared.runtime.states:sys", "shared.runtime.states:orjson.dumps"):
        with pytest.raises(BadState, match="no such class"):
            thaw(with_classes(lambda classes, other=other: classes.update({other: None})), PACKAGES)  # type: ignore[misc]


@pytest.mark.parametrize("of", [Tips, Trie, Holders, Pool, Operations])
def test_a_class_with_other_fields_makes_the_state_of_an_idle_manager_unreadable(of: type[Any]) -> None:
    """Nothing is in its trie, so no node, run or operation is there whose fields would differ as well."""
    document = orjson.loads(freeze(cachemgr.initial(COST)))
    name = f"{of.__module__}:{of.__qualname__}"
    assert not any("cachemgr.node:Node" in each for each in document["classes"])

    def refused(what: str) -> None:
        with pytest.raises(BadState, match=f"{of.__qualname__}.* has the fields"):
            thaw(orjson.dumps(changed), PACKAGES)
        assert what

    changed = deepcopy(document)
    changed["classes"][name] = changed["classes"][name][1:]
    refused("one that was not there yet")
    changed["classes"][name] = None
    refused("all, of when they were not written down")
    changed = deepcopy(document)
    [described] = [each for each in changed["objects"] if each[:2] == ["object", name]]
    described[2:] = [each[1:] for each in described[2:]]
    refused("of an object, and not of its class")


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{}", b"[]", b'{"classes":{},"objects":[]}', b'{"classes":{},"objects":[["tuple",[[7]]]]}'),
        *(b'{"classes":{},"objects":[["call",[]]]}', b'{"classes":{},"objects":[["tuple",[[0]]]]}'),
        b'{"classes":{},"objects":[["tuple",[[1]]],["bytes","%%"]]}',
        b'{"classes":{},"objects":[["tuple",[[1]]],["event","{}"]]}',
        b'{"classes":{},"objects":[["tuple",[[1]]],["dict",[[2]],[1]],["list",[]]]}',
    ],
)
def test_bytes_that_are_no_state_are_refused(raw: bytes) -> None:
    with pytest.raises(BadState):
        thaw(raw, PACKAGES)
