"""ρ by hand, and that it does not matter in which order assignments are heard of."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.rate import KEPT_S, Rate
from shared.contracts.events import RequestAssigned
from shared.contracts.ids import RequestId, WorkerId

SECOND_NS = 10**9


def assigned(second: float, service_us: int, attempt: int = 1) -> RequestAssigned:
    return RequestAssigned(
        request=RequestId("r"), attempt=attempt, worker=WorkerId("n0/1/0"), degree=1, policy="vertumnus", uncached_tokens=1,
        cached_tokens=0, service_us=service_us, queue_us=0, beta=1, lam=0, preferred_degree=1, candidates=(), price_digest="",
        parameters_version=0, coefficients_version="", seen_seq=0, now_ns=round(second * SECOND_NS),
    )  # fmt: skip


def rate_of(*facts: RequestAssigned) -> Rate:
    rate = Rate()
    for fact in facts:
        rate.fold(fact)
    return rate


def test_the_last_ten_whole_seconds_count() -> None:
    """8 s of work for 2 workers in 10 s: 40 %. What the current second has is not whole yet."""
    rate = rate_of(assigned(100, 3_000_000), assigned(109.9, 5_000_000), assigned(110, 9_000_000))
    assert rate.load_ppm(110 * SECOND_NS, 2) == 400_000
    assert rate.load_ppm(round(110.9 * SECOND_NS), 2) == 400_000
    assert rate.load_ppm(111 * SECOND_NS, 2) == 700_000
    assert rate.load_ppm(120 * SECOND_NS, 1) == 900_000
    assert rate.load_ppm(121 * SECOND_NS, 1) == 0


def test_a_second_attempt_is_the_same_work() -> None:
    assert rate_of(assigned(100, 1_000_000, attempt=2)).load_ppm(105 * SECOND_NS, 1) == 0


def test_nobody_has_no_load() -> None:
    assert rate_of(assigned(100, 1_000_000)).load_ppm(105 * SECOND_NS, 0) == 0


@given(st.lists(st.tuples(st.integers(0, 3 * KEPT_S), st.integers(1, 9)), max_size=30), st.randoms())
def test_any_order_gives_the_same(told: list[tuple[int, int]], chance: object) -> None:
    facts = [assigned(second, work) for second, work in told]
    shuffled = list(facts)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rate_of(*facts) == rate_of(*shuffled)
    assert len(rate_of(*facts).assigned_us) <= KEPT_S
