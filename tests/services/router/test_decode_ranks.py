"""Which decode rank goes on from a prefill: the node's own while they have room, then others', then whoever is waited for
least."""

from services.router.decode_ranks import cheapest
from services.router.loads import Loads
from shared.contracts.events import NodeLost
from shared.contracts.ids import NodeId, WorkerId
from tests.services.router.router_world import Log, pool_of

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
OPEN = {"decode_sequences": 2, "hands_off": True}


def pool(**n1: object) -> Log:
    """n0 has two decode ranks, n1 one unless said otherwise, n2 none."""
    log = Log()
    log.fold(*pool_of(1, node="n0", decode_ranks=2, **OPEN))  # type: ignore[arg-type]
    log.fold(*pool_of(1, node="n1", **{**OPEN, **n1}))  # type: ignore[arg-type]
    log.fold(*pool_of(1, node="n2", decode_ranks=0, **OPEN))  # type: ignore[arg-type]
    return log


def reserved(**requests: int) -> Loads:
    """So many requests at each rank, of ten tokens each; `n0_0` is rank 0 of n0."""
    loads = Loads()
    for name, count in requests.items():
        node, rank = name.split("_")
        worker = WorkerId(f"{node}/decode/{rank}")
        loads.decoding[worker], loads.output_tokens[worker] = count, 10 * count
    return loads


def chosen(log: Log, node: NodeId, loads: Loads) -> str | None:
    return cheapest(log.state.pool, loads, node)


def test_the_own_node_s_come_first_and_share_by_tokens() -> None:
    log = pool()
    assert chosen(log, N0, reserved()) == "n0/decode/0"
    assert chosen(log, N0, reserved(n0_0=1)) == "n0/decode/1"
    loads = reserved(n0_0=1, n0_1=1)
    loads.output_tokens[WorkerId("n0/decode/1")] = 3
    assert chosen(log, N0, loads) == "n0/decode/1"


def test_a_full_node_hands_off_to_another_while_that_has_room() -> None:
    log = pool()
    assert chosen(log, N0, reserved(n0_0=2, n0_1=2)) == "n1/decode/0"
    assert chosen(log, N0, reserved(n0_0=2, n0_1=1)) == "n0/decode/1"
    assert chosen(log, N0, reserved(n0_0=3, n0_1=2, n1_0=2)) == "n0/decode/1", "waited for at home, where it is least"


def test_a_node_without_decode_ranks_hands_off_even_to_a_full_one() -> None:
    log = pool()
    assert chosen(log, N2, reserved()) == "n0/decode/0"
    assert chosen(log, N2, reserved(n0_0=1, n0_1=1)) == "n1/decode/0"
    assert chosen(log, N2, reserved(n0_0=3, n0_1=2, n1_0=3)) == "n0/decode/1"


def test_who_did_not_answer_comes_last() -> None:
    log = pool()
    full = reserved(n0_0=2, n0_1=2)
    assert cheapest(log.state.pool, full, N0, (N1,)) == "n0/decode/0"
    assert cheapest(log.state.pool, reserved(), N2, (N0,)) == "n1/decode/0"
    assert cheapest(log.state.pool, reserved(), N2, (N0, N1)) == "n0/decode/0", "there is nobody else"


def test_nobody_takes_what_he_cannot_read_or_has_not_offered_to() -> None:
    full = reserved(n0_0=2, n0_1=2)
    for n1 in (
        {"model": "other"},
        {"block_tokens": 32},
        {"engine": "torch"},
        {"decode_sequences": 0},
        {"decode_ranks": 0},
    ):
        assert chosen(pool(**n1), N0, full) == "n0/decode/0", n1
    log = pool()
    log.fold(NodeLost(node=N1, incarnation=1, reason="test"))
    assert chosen(log, N0, full) == "n0/decode/0"


def test_a_node_that_does_not_hand_off_keeps_its_own_or_has_none() -> None:
    log = Log()
    log.fold(*pool_of(1, node="n0", decode_ranks=0), *pool_of(1, node="n1", **OPEN))  # type: ignore[arg-type]
    assert chosen(log, N0, reserved()) is None
    log = Log()
    log.fold(*pool_of(1, node="n0"), *pool_of(1, node="n1", **OPEN))  # type: ignore[arg-type]
    assert chosen(log, N0, reserved(n0_0=1_000)) == "n0/decode/0", "it has not said how many it takes"
