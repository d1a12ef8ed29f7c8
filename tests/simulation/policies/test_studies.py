"""Figures of runs, by hand, and rules that let requests wait."""

from collections.abc import Sequence

import pytest

from shared.contracts.ids import BLOCK_ID_BYTES
from shared.model.cost import Coefficients
from simulation.baselines.rules import RULES
from simulation.policies.agenda import NS_PER_S
from simulation.policies.arrivals import requests_of
from simulation.policies.routers import Asked
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.policies.studies import changes, compared, figures, policy, spread
from simulation.workloads.rows import Row

SECOND_A_KILOTOKEN = Coefficients(version="a second a kilotoken", d=0, a=0, b=0, c=0.001, alpha=0)


def at(*times_s: float, tokens: int = 1_000) -> Sequence[Asked]:
    """Prompts that share nothing. τ is 0.5 s and three quarters of their time alone."""
    return [Asked(round(time_s * NS_PER_S), tokens + n, ()) for n, time_s in enumerate(times_s)]


def one_worker(**fields: object) -> Setup:
    return Setup(((1,),), SECOND_A_KILOTOKEN, noise_sd=0, block_tokens=512, **fields)  # type: ignore[arg-type]


def test_the_figures_of_three_requests() -> None:
    simulation = Simulation(policy("paper").of(one_worker()))
    found = simulation.run(at(0, 0, 10, tokens=1_000))
    # 1.000; 1.000 + 1.001 behind it; 1.002 alone. τ = 0.5 + 3/4 s or a little more.
    assert found.ttft.mean_s == pytest.approx((1.0 + 2.001 + 1.002) / 3)
    assert found.ttft.p50_s == pytest.approx(1.002)
    assert found.ttft.queue_mean_s == pytest.approx(1.0 / 3)
    assert found.attainment == pytest.approx((1_000 + 1_002) / 3_003)
    assert (found.hit_rate, found.long, found.unserved, found.by_degree) == (0, None, 0, {1: 3})
    assert found.utilisation == pytest.approx((1 + 1.001 + 1.002) / 11.002, abs=1e-4)
    warm = Simulation(policy("paper").of(one_worker())).run(at(0, 0, 10), warmup_s=5)
    assert warm.ttft.requests == 1


def test_a_rule_may_let_requests_wait_at_the_router() -> None:
    simulation = Simulation(policy("central-fcfs").of(one_worker()))
    simulation.run(at(0, 0.1, 0.2))
    simulation.check()
    assert [float(each) / 1e6 for each in simulation.rows.column("ttft_us")] == pytest.approx([1.0, 1.901, 2.803])


@pytest.mark.parametrize("name", RULES)
def test_every_rule_serves_everybody(name: str) -> None:
    setup = Setup(((1, 1), (2,)), SECOND_A_KILOTOKEN, noise_sd=0)
    simulation = Simulation(policy(name).of(setup))
    simulation.run(at(*(number / 2 for number in range(30))))
    simulation.check()
    assert len(simulation.rows) == 30


def test_runs_are_paired_by_seed() -> None:
    runs = compared([policy("paper"), policy("least-work")], one_worker(), lambda seed: at(0, seed), [1, 2], 0)
    paper, least_work = ([run.outcome for run in runs if run.policy == name] for name in ("paper", "least-work"))
    assert [run.seed for run in runs] == [1, 1, 2, 2]
    assert changes(least_work, paper) == (0, 0)
    assert figures(paper)["mean_s"].mean == pytest.approx(1.0005)


def test_spread() -> None:
    assert spread([2.0]) == (2.0, 0.0)
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))


def test_a_row_shares_its_whole_blocks() -> None:
    row = Row(1.5, 1_025, 1, (7, 8, 9))
    [asked] = requests_of([row], 512)
    chain = tuple(each.to_bytes(BLOCK_ID_BYTES) for each in (7, 8))
    assert asked == Asked(1_500_000, 1_025, chain)
    with pytest.raises(ValueError, match="blocks of 512"):
        list(requests_of([row], 64))
