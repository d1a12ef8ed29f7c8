"""What a candidate's numbers are made of is said in words."""

import pytest

from cli.record.telling import how, price
from shared.contracts.events import PricedCandidate, RequestAssigned
from shared.contracts.ids import WorkerId
from tests.contracts.examples import example


def priced(**parts: object) -> PricedCandidate:
    return PricedCandidate.model_validate(
        {
            "worker": "n0/1/0",
            "degree": 1,
            "cached_tokens": 512,
            "queue_us": 0,
            "service_us": 9,
            "occupancy_us": 0,
            "price_us": 9,
        }
        | parts
    )


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, ""),
        ({"in_flight_tokens": 256}, "256 of the cached tokens are computed there now, for another request"),
        (
            {"fetch_from": WorkerId("n1/1/0"), "fetched_tokens": 2_048, "fetch_us": 12_300},
            "2,048 are fetched from n1/1/0 in 12.3 ms",
        ),
        ({"delayed_jobs": 1, "delay_us": 2_000_000}, "it delays 1 waiting request, 2.000 s in all"),
        ({"ratio": 1.5}, "its prefills take 1.50 × their prediction"),
    ],
)
def test_each_part_of_a_price_is_told(parts: dict[str, object], said: str) -> None:
    assert how(priced(**parts)) == said


def test_several_parts_are_told_together() -> None:
    assert how(priced(ratio=2.0, delayed_jobs=3, delay_us=5_000)) == (
        "it delays 3 waiting requests, 5.0 ms in all; its prefills take 2.00 × their prediction"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "paper"}, "queue + 3 × service + occupancy (λ = 0.05)"),
        ({"policy": "vertumnus"}, "queue + delay + 3 × service + occupancy (λ = 0.05)"),
        (
            {"policy": "vertumnus", "ratio_in_own_time": True},
            "queue + delay + service + 2 × service without the ratio + occupancy (λ = 0.05)",
        ),
        ({"policy": "least-work"}, "queue"),
    ],
    ids=["paper", "vertumnus", "own-time", "least-work"],
)
def test_what_a_price_is_a_sum_of_is_told(changes: dict[str, object], said: str) -> None:
    assert (
        price(
            example(RequestAssigned).data.model_copy(
                update={"beta": 3.0, "lam": 0.05, "ratio_in_own_time": False, **changes}
            )
        )
        == said
    )
