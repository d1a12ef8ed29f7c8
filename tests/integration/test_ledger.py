"""The ledger against everything that may die next to it. Each test ends with an audit of the whole record.

`pytest tests/integration/test_ledger.py --kills 100 --timeout 3600` is the long form of the first one.
"""

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import httpx
import nats
import pytest
from typer.testing import CliRunner

from cli.embedded.nats import EmbeddedNats
from cli.embedded.postgres import EmbeddedPostgres
from cli.main import app
from services.ledger.audit import Audit
from services.ledger.database import driver_url
from services.ledger.rebuild import rebuild
from shared.contracts.subjects import Subjects
from shared.runtime.clock import SystemClock
from tests.integration.ledger_rig import WAIT_S, LedgerRig, metric, until_reason
from tests.services.ledger.record_writer import tables
from tests.support.replica import eventually


@pytest.fixture
def rig(nats_server: EmbeddedNats, record_url: str, tmp_path: Path) -> Iterator[LedgerRig]:
    made = LedgerRig(nats_server, record_url, tmp_path)
    yield made
    made.stop()


@pytest.fixture
def rig_on_own_postgres(nats_server: EmbeddedNats, own_record_url: str, tmp_path: Path) -> Iterator[LedgerRig]:
    made = LedgerRig(nats_server, own_record_url, tmp_path)
    yield made
    made.stop()


async def test_exactly_once_through_kills_at_any_moment(rig: LedgerRig, kills: int) -> None:
    chance = random.Random(1)
    ledger = rig.ledger()
    async with rig.runtime() as runtime:
        async with rig.load(runtime) as load:
            for _ in range(kills):
                ledger.start()
                before = await rig.copied_seq()
                await rig.until_copied(before + 1)
                await asyncio.sleep(chance.uniform(0, 0.4))
                ledger.stop(kill=True)
            ledger.start()
        await rig.until_copied(load.last_seq)
    found = await rig.audited()
    assert found.events == load.events
    assert found.by_table["repeats"] == 0

    ledger.stop()
    connection = await asyncpg.connect(driver_url(rig.url))
    live = await tables(connection)
    await rebuild(rig.url)
    rebuilt = await tables(connection)
    await connection.close()
    for table, rows in live.items():
        assert rebuilt[table] == rows, f"{table} differs from what the record says"
    assert len(live["requests"]) == found.requests


async def test_postgres_stops_and_crashes_under_load(
    rig_on_own_postgres: LedgerRig, own_postgres: EmbeddedPostgres
) -> None:
    rig = rig_on_own_postgres
    ledger = rig.ledger()
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime) as load:
            for crash in (False, True):
                await until_reason(ledger, None)
                await rig.until_copied(load.last_seq + 200)
                own_postgres.stop(kill=crash)
                await until_reason(ledger, "Error")
                async with httpx.AsyncClient(timeout=10) as client:
                    assert (await client.get(f"{ledger.url}/v1/state")).status_code == 503
                away = load.last_seq
                await asyncio.sleep(1)
                assert await metric(ledger, "vertumnus_ledger_lag_events") > 0
                assert load.last_seq > away, "publishing goes on"
                own_postgres.start()
        await rig.until_copied(load.last_seq)
        await until_reason(ledger, None)
        assert ledger.exit_status() is None, "the process outlived all of it"
    assert (await rig.audited()).events == load.events


async def test_nats_crashes_under_load(rig: LedgerRig) -> None:
    ledger = rig.ledger()
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime) as load:
            await rig.until_copied(500)
            rig.nats.stop(kill=True)
            await asyncio.sleep(1)
            rig.nats.start()
            await rig.until_copied(load.last_seq + 500)
        await rig.until_copied(load.last_seq)
        assert ledger.exit_status() is None
    assert (await rig.audited()).events == load.events


async def test_one_of_two_ledgers_copies_and_the_other_takes_over(rig: LedgerRig) -> None:
    first, second = rig.ledger("1"), rig.ledger("2")
    first.start()
    await until_reason(first, None)
    second.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime) as load:
            await rig.until_copied(500)
            await until_reason(second, None)
            active = [await metric(each, "vertumnus_ledger_active") for each in (first, second)]
            assert active == [1, 0]
            first.stop(kill=True)
            await rig.until_copied(load.last_seq + 500)
            assert await metric(second, "vertumnus_ledger_active") == 1
        await rig.until_copied(load.last_seq)
    assert (await rig.audited()).events == load.events


async def test_a_lost_stream_begins_a_new_log(rig: LedgerRig) -> None:
    ledger = rig.ledger()
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime, seed=1) as load:
            await rig.until_copied(300)
        await rig.until_copied(load.last_seq)
    rig.nats.stop()
    shutil.rmtree(rig.nats.directory / "store")
    rig.nats.start()
    await eventually(lambda: ledger.exit_status() is not None)
    assert ledger.exit_status() == 1, "the supervisor starts it again"
    ledger.stop()
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime, seed=2) as second:
            await rig.until_copied(300, log_number=2)
        await rig.until_copied(second.last_seq, log_number=2)
    found = await rig.audited()
    assert (found.logs, found.by_type["log-reset"]) == (2, 1)
    assert found.events == load.events + second.events + 1


@pytest.mark.parametrize("overtaken", [False, True])
async def test_a_stream_that_was_put_back_begins_a_new_log(rig: LedgerRig, tmp_path: Path, overtaken: bool) -> None:
    """Noticed by its last sequence, or, once new events have overtaken the checkpoint, by the message that lies there."""
    ledger = rig.ledger()
    async with rig.runtime() as runtime, rig.load(runtime, seed=1) as early:
        await asyncio.sleep(0.3)
    rig.nats.stop()
    shutil.copytree(rig.nats.directory / "store", tmp_path / "backup")
    rig.nats.start()
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime, seed=2, pool_starts=False) as load:
            await asyncio.sleep(0.3)
        await rig.until_copied(load.last_seq)
    ledger.stop()
    rig.nats.stop()
    shutil.rmtree(rig.nats.directory / "store")
    shutil.copytree(tmp_path / "backup", rig.nats.directory / "store")
    rig.nats.start()
    if not overtaken:
        ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime, seed=3, pool_starts=False) as late:
            await eventually(lambda: late.last_seq > load.last_seq)
        if overtaken:
            ledger.start()
        await rig.until_copied(late.last_seq, log_number=2)
    found = await rig.audited()
    assert found.logs == 2
    assert found.by_table["repeats"] == early.events
    assert found.by_type["log-reset"] == 1


class LongAgo(SystemClock):
    """The clock of a sender that lives 20 days ago."""

    def now_ns(self) -> int:
        return super().now_ns() - 20 * 86_400 * 10**9


async def test_the_record_is_sealed_and_old_days_go(rig: LedgerRig) -> None:
    day = datetime.fromtimestamp(LongAgo().now_ns() / 1e9, UTC).date()
    owner = await asyncpg.connect(driver_url(rig.url))
    for each in (day, day + timedelta(1)):  # a partition is only made for days around today
        await owner.execute(
            f"CREATE TABLE block_events_{each:%Y%m%d} PARTITION OF block_events "
            f"FOR VALUES FROM ('{each}') TO ('{each + timedelta(1)}')"
        )
    ledger = rig.ledger(VERTUMNUS_SEAL_EVERY_S="1", VERTUMNUS_BLOCK_DAYS_KEPT="8")
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime._replace(clock=LongAgo())) as load:
            await rig.until_copied(200)
        await rig.until_copied(load.last_seq)

        async def found() -> Audit:
            return await rig.audited(settled=False)

        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not (audited := await found()).dropped_rows or audited.seals < 2:
            assert asyncio.get_running_loop().time() < deadline, audited
            await asyncio.sleep(0.2)
        ledger.stop(kill=True)
        ledger.start()
        async with rig.load(runtime, seed=2, pool_starts=False) as more:
            await rig.until_copied(more.last_seq)
    audited = await rig.audited(settled=False)
    assert audited.by_type["block-day-dropped"] >= 1
    assert audited.by_type["log-sealed"] >= 2
    assert await owner.fetchval("SELECT count(*) FROM snapshots") >= 2, "one with each seal"
    await owner.close()


async def test_a_gap_stops_the_copy_until_it_is_accepted(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", rig.url)
    ledger = rig.ledger()
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime) as load:
            await rig.until_copied(200)
            ledger.stop()
            copied = await rig.copied_seq()
            await eventually(lambda: load.last_seq > copied + 101)
        client = await nats.connect(rig.nats.url)
        await client.jetstream().purge_stream(Subjects("main").stream, seq=copied + 101)
        await client.close()
        ledger.start()
        said = await until_reason(ledger, "accept-gap")
        assert f"messages {copied + 1} to {copied + 100}" in said
        assert await rig.copied_seq() == copied
        accepted = await asyncio.to_thread(
            CliRunner().invoke, app, ["ledger", "accept-gap", "--reason", "a full disk", "--by", "ann"]
        )
        assert accepted.exit_code == 0, accepted.output
        await until_reason(ledger, None)
        await rig.until_copied(load.last_seq)
        again = await asyncio.to_thread(CliRunner().invoke, app, ["ledger", "accept-gap", "--reason", "x"])
        assert again.exit_code == 1
    found = await rig.audited(settled=False)
    assert found.accepted_gap_events == 100
    assert found.events == load.events - 100


async def test_queries_and_commands(rig: LedgerRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "operator.key"
    key.write_text("let-me-in\n")
    ledger = rig.ledger(VERTUMNUS_OPERATOR_KEY_FILE=str(key))
    ledger.start()
    async with rig.runtime() as runtime:
        async with rig.load(runtime) as load:
            await rig.until_copied(300)
        await rig.until_copied(load.last_seq)
    async with httpx.AsyncClient(base_url=ledger.url, timeout=10) as client:
        assert (await client.get("/v1/events")).status_code == 401
        client.headers["Authorization"] = "Bearer let-me-in"
        await check_queries(client)
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", rig.url)
    monkeypatch.setenv("VERTUMNUS_NATS_URL", rig.nats.url)
    await asyncio.to_thread(check_commands)


async def check_queries(client: httpx.AsyncClient) -> None:
    page = (await client.get("/v1/events", params={"limit": 40})).json()
    assert [each["stream_seq"] for each in page["events"]] == list(range(1, 41))
    following = (await client.get("/v1/events", params={"after": page["next"], "limit": 1})).json()
    assert following["events"][0]["stream_seq"] == 41
    stored = (await client.get("/v1/events", params={"type": "blocks-stored", "limit": 3})).json()["events"]
    assert {each["type"] for each in stored} == {"blocks-stored"}
    for name in (stored[0]["id"], str(stored[0]["stream_seq"]), f"{stored[0]['log']}:{stored[0]['stream_seq']}"):
        assert (await client.get(f"/v1/events/{name}")).json() == stored[0]
    request = (await client.get("/v1/requests/r1-1")).json()
    assert request["events"][0]["type"] == "request-received"
    assert request["request"]["ended"] in {"completed", "cancelled", "rejected"}
    state = (await client.get("/v1/state")).json()
    assert state["nodes"][0]["composition"] == [1, 1, 2, 4]
    assert len(state["workers"]) == 4
    windows = (await client.get("/v1/windows")).json()["windows"]
    assert [each["k"] for each in windows] == list(range(len(windows), 0, -1))
    for path, status in {
        "/v1/events/999999": 404,
        "/v1/events/abc": 422,
        "/v1/events?limit=0": 422,
        "/v1/requests/no": 404,
    }.items():
        assert (await client.get(path)).status_code == status, path


def check_commands() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["events", "audit", "--settled"]).exit_code == 0
    audited = json.loads(runner.invoke(app, ["events", "audit", "--json"]).stdout)
    assert audited["violation_count"] == 0
    assert audited["by_type"]["epoch-committed"] == 1
    none = runner.invoke(app, ["events", "tail", "-n", "10", "--type", "frozen"])
    assert "none of the newest 100,000 events is frozen" in none.stderr
    slip = runner.invoke(app, ["events", "tail", "--type", "epoch-comitted"])
    assert slip.exit_code == 2
    assert "epoch-committed" in slip.stderr
    tail = runner.invoke(app, ["events", "tail", "-n", "1", "--type", "epoch-committed"])
    assert tail.exit_code == 0, tail.output
    assert len(tail.stdout.splitlines()) == 1
    assert "epoch=1" in tail.stdout
    seq = tail.stdout.split()[0]
    assert '"epoch-committed"' in runner.invoke(app, ["events", "get", seq]).stdout
    assert "request-received" in runner.invoke(app, ["events", "get", "r1-1"]).stdout
    assert "request-received" in runner.invoke(app, ["events", "get", "chatcmpl-r1-1"]).stdout
    assert runner.invoke(app, ["events", "get", "nothing"]).exit_code == 1
