"""A simulated run as a record: it verifies like any other, and asked again it comes out as it was.

The record is a real one, in Postgres, with every event of the run. The simulator stands in for the pool that wrote it, which
makes what `what-if` should answer exact.
"""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

import orjson
import pytest
from typer.testing import CliRunner

from cli.main import app
from replay.verification import verify
from replay.verifying import EVERYTHING, Span
from services.ledger.records import Arrival
from shared.contracts.codec import encode
from shared.contracts.envelope import Stored
from shared.contracts.events import CacheScanCompleted
from shared.contracts.ids import NodeId
from shared.model.cost import load_coefficients
from simulation.policies.arrivals import requests_of
from simulation.policies.recorded import NoRun, Recorded, recorded_run
from simulation.policies.run import Simulation
from simulation.policies.setup import Setup
from simulation.policies.studies import against_recorded
from simulation.workloads.generating import SHAPES, Phase, generated
from tests.services.ledger.record_writer import RecordWriter

SETUP = Setup(
    ((4, 4), (8,)),
    load_coefficients("qwen3_30b_a3b_h20"),
    parameters={"worker_order": "fcfs", "cache_policy": "regret", "scan_every_s": 0.5},
    noise_sd=0,
    stragglers={NodeId("n1"): 1.5},
)


REQUESTS = tuple(requests_of(generated([Phase(60, 2, SHAPES["tool-agent"])], Random(1)), SETUP.block_tokens))


@pytest.fixture(scope="module")
def run() -> tuple[Simulation, list[Stored]]:
    """A minute of traffic, and its log as a stream would hold it."""
    told: list[Stored] = []
    simulation = Simulation(replace(SETUP, seed=1))
    simulation.journal.listen(told.append)
    simulation.run(REQUESTS)
    return simulation, told


@pytest.fixture
async def record(record_url: str, run: tuple[Simulation, list[Stored]]) -> str:
    """The URL of its record. Events have ids of their own there."""
    events = [each.event.model_copy(update={"id": UUID(int=each.stream_seq)}) for each in run[1]]
    writer = RecordWriter(record_url)
    await writer.restart()
    await writer.write([Arrival(seq, encode(event)) for seq, event in enumerate(events, 1)])
    await writer.close()
    return record_url


async def reading(url: str, span: Span = EVERYTHING) -> Recorded:
    return await recorded_run(url, span, lambda _: None)


async def test_what_the_simulator_decides_verifies(record: str) -> None:
    found = await verify(record, deep=True)
    assert found.clean, found.findings.differences
    assert found.findings.checked["request-assigned"] >= len(REQUESTS)
    assert found.findings.checked["epoch-committed"] == 2


async def test_a_run_without_chance_comes_out_as_it_was(record: str, run: tuple[Simulation, list[Stored]]) -> None:
    recorded = await reading(record)
    assert [each.chain for each in recorded.requests] == [each.chain for each in REQUESTS]
    assert recorded.setup.compositions == SETUP.compositions
    assert recorded.setup.stragglers == pytest.approx({"n0": 1.0, "n1": 1.5}, abs=1e-3)
    assert recorded.setup.noise_sd == pytest.approx(0, abs=1e-3)
    assert any(isinstance(each.data, CacheScanCompleted) for each in run[1]), "its cache policy had a manager"
    assert recorded.setup.parameters == SETUP.parameters, "no policy that changes compositions: they stay as they were"
    found = against_recorded(recorded, replace(recorded.setup, parameters={"worker_order": "fcfs", "lam": 10}), [1, 2])
    rows = run[0].rows
    assert recorded.outcome.ttft.mean_s == pytest.approx(rows.column("ttft_us").mean() / 1e6)
    for same in found.as_recorded:
        assert same.ttft.mean_s == pytest.approx(recorded.outcome.ttft.mean_s, rel=0.01)
        assert same.ttft.p90_s == pytest.approx(recorded.outcome.ttft.p90_s, rel=0.02)
        assert same.hit_rate == pytest.approx(recorded.outcome.hit_rate, abs=0.005)
    assert all(other.by_degree != recorded.outcome.by_degree for other in found.alternative)


async def test_a_range_is_entered_with_warm_caches(record: str, run: tuple[Simulation, list[Stored]]) -> None:
    half_ns = 30 * 10**9
    recorded = await reading(record, EVERYTHING._replace(from_ns=half_ns))
    later = [each for each in REQUESTS if each.at_ns >= half_ns]
    assert len(recorded.requests) == len(REQUESTS), "what came before is played, and not counted"
    assert recorded.outcome.ttft.requests == len(later)
    [again] = against_recorded(recorded, recorded.setup, [1]).as_recorded
    assert again.ttft.requests == len(later)
    with pytest.raises(NoRun, match="no request arrived"):
        await reading(record, EVERYTHING._replace(from_ns=10**15))


async def test_the_command(record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", record)

    def asked(*options: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["what-if", *options])
        assert result.exit_code == status, result.output
        return result.output

    def answer(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(asked(*options, "--seeds", "2", "--json").splitlines()[-1])
        return found

    # The command runs an event loop of its own.
    shown = await asyncio.to_thread(asked, "--set", "lam=0", "--seeds", "2")
    for word in ("recorded policy, simulated", "alternative, simulated", "Both simulated columns are modelled"):
        assert word in shown
    assert "nothing reads it" not in shown, "the recorded policy prices by it"
    found = await asyncio.to_thread(answer, "--policy", "round-robin", "--node", "2x8")
    assert found["mean_change"]["mean"] > 0
    assert found["recorded"]["mean_s"] == pytest.approx(found["as_recorded"]["mean_s"]["mean"], rel=0.02)
    for unheeded, why in {
        ("--set", "lam=0.2", "--policy", "round-robin"): "lam: nothing reads it now",
        ("--set", "up=0.5"): "up: nothing reads it now; it is read with reconfiguration_policy=paper",
    }.items():
        assert why in await asyncio.to_thread(asked, *unheeded, "--seeds", "1")
    doubled = await asyncio.to_thread(answer, "--gpus", "32")
    assert doubled["alternative"]["mean_s"]["mean"] < doubled["as_recorded"]["mean_s"]["mean"]
    assert "nothing is different" in await asyncio.to_thread(asked, status=2)
    assert "lam" in await asyncio.to_thread(asked, "--set", "lam=-1", status=2)


async def test_thresholds_of_the_cache_manager_are_tried_on_the_record(
    record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", record)
    options = ["calibrate-cache", "--limit", "30", "--seeds", "1", "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, app, options)
    assert result.exit_code == 0, result.output
    found = orjson.loads(result.stdout)
    assert found["window"] == "30 recorded requests on 16 GPUs"
    names = [each["name"] for each in found["tried"]]
    assert names[:2] == ["in force", "lru"]
    assert {"paper", "regret"} < set(names)
