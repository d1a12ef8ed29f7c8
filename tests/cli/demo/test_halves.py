"""The requests that the demo sends: they fit, they share what the trace shares, and they come at the half's rate."""

from pathlib import Path

import pytest

from cli.demo.halves import Half, real, scale
from cli.trace.prompts import prompt_tokens
from shared.model.lattice import merges, splits
from simulation.workloads.rows import BLOCK_TOKENS, Row, write
from simulation.workloads.statistics import statistics

REAL, SCALE = real(Path("model")), scale()


def trace_of(path: Path, rows: list[Row]) -> Path:
    with path.open("wb") as file:
        write(rows, file)
    return path


def row(arrival_ms: float, *hash_ids: int, prompt_tokens: int | None = None) -> Row:
    return Row(arrival_ms, prompt_tokens or len(hash_ids) * BLOCK_TOKENS, 400, hash_ids)


@pytest.mark.parametrize("half", [REAL, SCALE], ids=lambda half: half.directory)
def test_made_up_requests_fit_and_repeat(half: Half) -> None:
    rows = half.rows(None)
    assert rows == half.rows(None)
    assert len(rows) == half.requests
    for each in rows:
        assert 1 <= each.prompt_tokens <= half.prompt_tokens_max
        assert each.output_tokens <= half.output_tokens_max
        assert len(each.hash_ids) == -(-each.prompt_tokens // each.block_tokens)
    found = statistics(rows)
    assert found.ideal_hit_rate > 0.3, "prefixes are shared, or the demo shows no reuse"
    assert found.requests_per_s == pytest.approx(half.requests_per_s * half.speedup, rel=0.3)


def test_what_the_trace_shares_stays_shared_in_shorter_prompts(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path / "t.jsonl", [row(0, 1, 2, 3), row(1000, 1, 2, 4), row(2000, 5, 6, 7, prompt_tokens=1100)]
    )
    first, second, third = REAL.rows(trace)
    assert first.block_tokens == 16
    assert (first.prompt_tokens, second.prompt_tokens) == (48, 48)
    assert third.prompt_tokens == 32 + 3, "the part of a last block shrinks as blocks do"
    assert prompt_tokens(first)[:32].tolist() == prompt_tokens(second)[:32].tolist()
    assert prompt_tokens(first)[32:].tolist() != prompt_tokens(second)[32:].tolist()


def test_a_prompt_that_would_have_to_be_cut_is_left_out(tmp_path: Path) -> None:
    longest = REAL.prompt_tokens_max * 32 // BLOCK_TOKENS
    rows = [row(0, *range(longest + 1)), row(1000, *range(100, 100 + longest))]
    (kept,) = REAL.rows(trace_of(tmp_path / "t.jsonl", rows))
    assert kept.prompt_tokens == REAL.prompt_tokens_max
    with pytest.raises(ValueError, match="none of its first 1 prompts has at most 16,384 tokens"):
        REAL.rows(trace_of(tmp_path / "long.jsonl", rows[:1]))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the trace has no rows"):
        REAL.rows(trace_of(tmp_path / "t.jsonl", []))


def test_the_real_half_splits_a_worker_and_merges_two() -> None:
    split, merged = REAL.moves
    before = REAL.choices.composition
    assert split in splits(before, (1, 2, 4))
    assert merged == before
    assert merged in merges(split, (1, 2, 4))


def test_objectives_are_those_of_the_cost_model_in_the_clients_time() -> None:
    slo_s = SCALE.coefficients.slo_us(10_000) / 1e6
    assert SCALE.for_prompt(10_000) == pytest.approx(slo_s / SCALE.speedup)
    assert REAL.for_prompt(100) == pytest.approx(REAL.coefficients.slo_us(100) / 1e6)
