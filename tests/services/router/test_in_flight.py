"""The tree of chains on their way against a list of them."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from services.router.in_flight import InFlight
from shared.contracts.ids import BlockId, RequestId, WorkerId
from shared.model.holders import Chain


def chain_of(turns: str) -> Chain:
    """Each block names all before it, as a hash would."""
    return tuple(BlockId(turns[: end + 1].encode()) for end in range(len(turns)))


def common(one: Chain, other: Chain) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


CHAINS = st.text("ab", max_size=9).map(chain_of)
CHANGES = st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["n0/1/0", "n0/1/1", "n1/1/0"]), CHAINS), max_size=30)


@given(CHANGES, CHAINS)
def test_it_finds_what_a_look_at_every_chain_finds(changes: list[tuple[int, str, Chain]], asked: Chain) -> None:
    """A change adds a request, or removes it if it is on its way."""
    tree, known = InFlight(), dict[RequestId, tuple[WorkerId, Chain]]()
    for number, worker, chain in changes:
        request = RequestId(f"r{number}")
        if known.pop(request, None) is not None:
            tree.remove(request)
        else:
            known[request] = WorkerId(worker), chain
            tree.add(request, WorkerId(worker), chain)
        tree.check()
    longest: dict[WorkerId, int] = {}
    for worker, chain in known.values():
        if blocks := common(chain, asked):
            longest[worker] = max(blocks, longest.get(worker, 0))
    found = tree.matches(asked)
    assert {worker: coming.blocks for worker, coming in found.items()} == longest
    for worker, coming in found.items():
        assert set(coming.providers) == {
            request
            for request, (where, chain) in known.items()
            if where == worker and common(chain, asked) == coming.blocks
        }
    for request in known:
        tree.remove(request)
    assert tree == InFlight()
    assert not tree.matches(asked)


def test_equal_is_who_is_on_the_way_not_how_they_came() -> None:
    one, other = InFlight(), InFlight()
    for tree, order in ((one, "xyz"), (other, "zxy")):
        for name in order:
            tree.add(RequestId(name), WorkerId("n0/1/0"), chain_of("aab" + name))
    one.add(RequestId("gone"), WorkerId("n0/1/0"), chain_of("aa"))
    assert one != other
    one.remove(RequestId("gone"))
    assert one == other


def test_a_copy_of_many_requests_each_of_which_goes_on_from_the_last_is_equal_and_its_own() -> None:
    """Each is a run below the one before: more of them than the interpreter's stack has room for."""
    tree = InFlight()
    chain = tuple(BlockId(number.to_bytes(16, "big")) for number in range(1_000))
    for blocks in range(1, len(chain)):
        tree.add(RequestId(f"r{blocks}"), WorkerId("n0/1/0"), chain[:blocks])
    copy = deepcopy(tree)
    copy.check()
    assert copy == tree
    copy.remove(RequestId("r999"))
    assert copy != tree
    tree.check()
