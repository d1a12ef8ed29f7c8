"""What was kept last time spares the next time; and what another version has kept is not in the way."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest

from replay import keeping
from replay.verification import verify
from services.ledger import states
from services.ledger.database import driver_url
from services.router import decider as router
from tests.replay.lagging_world import World
from tests.replay.test_parts_of_records import Sealing, record, vertumnus
from tests.replay.test_verifying import second_best
from tests.services.ledger.record_writer import RecordWriter


async def test_what_is_new_is_verified_and_told_to_prometheus(
    writer: RecordWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.keeping.RUN_UP_EVENTS", 0)
    *_, third = await record(writer)
    file = tmp_path / "verify.prom"
    arguments = ("verify", "--new", "--keep", "--json", "--metrics", str(file))
    whole, since = [json.loads(await vertumnus(writer.url, *arguments)) for _ in range(2)]
    assert (whole["begun_seq"], whole["kept_seq"]) == (0, third)
    assert since["begun_seq"] == third
    assert 0 < sum(since["checked"].values()) < sum(whole["checked"].values())
    samples = dict(line.rsplit(" ", 1) for line in file.read_text().splitlines() if not line.startswith("#"))
    assert float(samples["vertumnus_verify_last_sequence"]) == writer.checkpoint.stream_seq == since["reached_seq"]
    assert float(samples["vertumnus_verify_checked_decisions"]) == sum(since["checked"].values())
    assert float(samples["vertumnus_verify_differing_decisions"]) == 0
    assert float(samples["vertumnus_verify_timestamp_seconds"]) > 1e9
    refused = await vertumnus(writer.url, "verify", "--new", "--from", "5", status=2)
    assert "--new is a range of its own" in refused
    nowhere = await vertumnus(writer.url, "verify", "--metrics", str(tmp_path / "no" / "where.prom"), status=1)
    assert "No such file" in nowhere
    assert "decisions come out again" in nowhere, "what was found is told whatever becomes of the metrics"
    assert "behind --to" in await vertumnus(writer.url, "verify", "--keep", "--to", "5", status=2)
    upto = json.loads(await vertumnus(writer.url, "verify", "--to", "100", "--json"))
    assert upto["reached_seq"] == 100


async def test_a_quiet_pool_is_not_folded_from_its_beginning_again_and_again(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each seal's state were kept, all that stay would lie within one run-up, and none before it."""
    run_up, apart, stay = 150, 60, 4
    monkeypatch.setattr("replay.keeping.RUN_UP_EVENTS", run_up)
    monkeypatch.setattr("replay.keeping.KEPT_APART_EVENTS", apart)
    monkeypatch.setattr("services.ledger.states.KEPT_MAX", stay)
    world = World(1)
    sealing, checked, kept, ends, folded = Sealing(writer, world), 0, 0, list[int](), list[int]()
    for _ in range(20):
        world.run(40)
        ends.append(await sealing.seal())
        found = await verify(writer.url, new=True, keep=True, jobs=1)
        assert found.findings.clean
        assert not found.findings.skipped
        folded.append(found.events)
        checked += found.findings.checked.total()
        kept += found.kept is not None
    hour = max(end - before for before, end in pairwise(ends))
    assert hour < apart, "fewer events come in an hour than kept states are apart"
    assert kept > stay
    assert await states.places(writer.connection, 1) != ends[-stay:], "not every hour's state is kept"
    # What came behind the newest kept state, the run-up before that, and back from there to the next kept state.
    assert max(folded[10:]) <= run_up + 2 * (apart + hour) < ends[-1], folded
    whole = await verify(writer.url, jobs=1)
    assert checked >= whole.findings.checked.total(), "nothing was passed over"


def test_the_states_that_stay_reach_behind_a_run_up() -> None:
    """Whatever comes in an hour: the oldest lies before what the newest needs."""
    assert (states.KEPT_MAX - 1) * keeping.KEPT_APART_EVENTS >= keeping.RUN_UP_EVENTS


async def test_nothing_is_kept_while_a_decision_differs(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next run would begin behind it, and find nothing."""
    await record(writer)
    with monkeypatch.context() as planted:
        planted.setattr(router, "choose", second_best(router.choose))
        found = await verify(writer.url, keep=True, jobs=1)
    assert found.findings.differences
    assert found.kept is None
    assert (await verify(writer.url, keep=True, jobs=1)).begun_seq == 0


async def of_another_version(url: str) -> None:
    """Let the kept states have been written when a class had another field."""
    owner = await asyncpg.connect(driver_url(url))
    for row in await owner.fetch("SELECT log, stream_seq, content FROM states"):
        document: dict[str, Any] = orjson.loads(row["content"])
        document["classes"]["replay.freezing:Frozen"].append("of_old")
        changed = orjson.dumps(document)
        await owner.execute(
            "UPDATE states SET content = $3 WHERE log = $1 AND stream_seq = $2", row["log"], row["stream_seq"], changed
        )
    await owner.close()


async def test_what_another_version_has_kept_is_passed_over(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.keeping.RUN_UP_EVENTS", 0)
    *_, third = await record(writer)
    await vertumnus(writer.url, "verify", "--keep")
    await of_another_version(writer.url)
    told = json.loads(await vertumnus(writer.url, "verify", "--from", str(third + 1), "--json"))
    assert (told["begun_seq"], told["differing"]) == (0, {})


async def test_a_part_of_another_version_says_what_to_do(writer: RecordWriter, elsewhere: str, tmp_path: Path) -> None:
    _, second, _ = await record(writer)
    file = str(tmp_path / "incident")
    await vertumnus(writer.url, "ledger", "export", file, "--from", str(second + 5))
    await vertumnus(elsewhere, "ledger", "import", file)
    await of_another_version(elsewhere)
    refused = await vertumnus(elsewhere, "verify", status=1)
    assert "was written by another version" in refused
    assert "export the part again" in refused
