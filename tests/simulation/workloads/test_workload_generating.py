"""Made-up traces repeat with their seed, look as they say they do, and their sessions grow."""

from collections import Counter
from itertools import pairwise
from random import Random
from statistics import fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.workloads.catalogue import WORKLOADS
from simulation.workloads.generating import SHAPES, Phase, Shape, Spread, arrivals_s, generated, wavering_s
from simulation.workloads.rows import BLOCK_TOKENS, Row
from simulation.workloads.statistics import COUNT_S, statistics
from tests.simulation.workloads.checking import check_rows

SHAPE_NAMES = st.sampled_from(sorted(SHAPES))


def rows_of(*phases: Phase, seed: int = 1) -> list[Row]:
    return list(generated(phases, Random(seed)))


@settings(max_examples=20)
@given(SHAPE_NAMES, st.integers(0, 99))
def test_rows_are_well_formed_and_repeat_with_their_seed(name: str, seed: int) -> None:
    phases = [Phase(20, 5, SHAPES[name]), Phase(20, 2, SHAPES["conversation"])]
    rows = rows_of(*phases, seed=seed)
    assert rows == rows_of(*phases, seed=seed)
    assert rows[-1].arrival_ms < 40_000
    check_rows(rows)
    assert rows != rows_of(*phases, seed=seed + 1)


@pytest.mark.parametrize(
    ("name", "rate", "prompt", "p50", "p90", "output", "hit", "burstiness"),
    [
        ("conversation", 12_031 / 3_537, 12_035, 6_909, 27_367, 343, 0.374, 1.5),
        ("tool-agent", 23_608 / 3_600, 8_596, None, None, 182, 0.59, 1),
    ],
)
def test_shapes_have_the_published_statistics(
    name: str, rate: float, prompt: int, p50: int | None, p90: int | None, output: int, hit: float, burstiness: float
) -> None:
    found = statistics(WORKLOADS[name](Random(1)))
    assert found.requests_per_s == pytest.approx(rate, rel=0.03)
    assert found.prompt_tokens.mean == pytest.approx(prompt, rel=0.07)
    assert found.output_tokens.mean == pytest.approx(output, rel=0.07)
    assert found.ideal_hit_rate == pytest.approx(hit, abs=0.04)
    assert p50 is None or found.prompt_tokens.p50 == pytest.approx(p50, rel=0.07)
    assert p90 is None or found.prompt_tokens.p90 == pytest.approx(p90, rel=0.07)
    assert found.burstiness == pytest.approx(burstiness, abs=0.3)


@pytest.mark.parametrize("burstiness", [1.0, 1.5, 4.0])
def test_a_phase_is_as_bursty_as_it_says(burstiness: float) -> None:
    phase = Phase(40_000, 2, SHAPES["conversation"], burstiness)
    counts = Counter(int(at_s // COUNT_S) for at_s in wavering_s(phase, Random(1)))
    found = [counts[bucket] for bucket in range(4_000)]
    assert fmean(found) == pytest.approx(20, rel=0.03)
    assert pvariance(found) / fmean(found) == pytest.approx(burstiness, rel=0.15)
    with pytest.raises(ValueError, match=r"burstiness: 0\.5 is below 1"):
        rows_of(phase._replace(burstiness=0.5))


def test_a_session_grows_by_its_answer_and_the_next_message() -> None:
    shape = Shape(1, Spread(600, 0), Spread(1000, 0), Spread(200, 0), Spread(100, 0), turns=1e9, think_s=1e-9)
    rows = rows_of(Phase(5, 2, shape))
    # No think time to speak of: one session, each arrival its next turn.
    assert [row.prompt_tokens for row in rows] == [1600 + 300 * turn for turn in range(len(rows))]
    for before, after in pairwise(rows):
        whole = before.prompt_tokens // BLOCK_TOKENS
        assert after.hash_ids[:whole] == before.hash_ids[:whole]
        assert before.hash_ids[whole:] == () or after.hash_ids[whole] != before.hash_ids[whole]


def test_a_prompt_never_outgrows_its_limit() -> None:
    shape = SHAPES["conversation"]._replace(prompt_tokens_max=4096, turns=50, think_s=0.1)
    rows = rows_of(Phase(60, 10, shape))
    assert max(row.prompt_tokens for row in rows) == 4096


def test_phases_follow_each_other_at_their_rates() -> None:
    rows = rows_of(Phase(100, 10, SHAPES["tool-agent"]), Phase(100, 2, SHAPES["conversation"]))
    early = [row for row in rows if row.arrival_ms < 100_000]
    assert len(early) == pytest.approx(1000, rel=0.1)
    assert len(rows) - len(early) == pytest.approx(200, rel=0.25)


def test_a_phase_without_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="phase: 0 requests/s for 10 s; both must be above 0"):
        rows_of(Phase(10, 0, SHAPES["tool-agent"]))


def test_arrivals_follow_a_rate_that_changes() -> None:
    arrivals = list(arrivals_s(lambda at_s: 10 if at_s < 300 else 2, 10, 600, Random(1)))
    early = [at_s for at_s in arrivals if at_s < 300]
    assert len(early) == pytest.approx(3_000, rel=0.06)
    assert len(arrivals) - len(early) == pytest.approx(600, rel=0.12)
    assert arrivals == sorted(arrivals)
