"""Three routers under load, killed and started anew, and then every decision in the record made again."""

import asyncio
import base64
import gzip
import io
import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest
from typer.testing import CliRunner

from cli.embedded.nats import EmbeddedNats
from cli.main import app
from replay.findings import RECORDED_INPUTS
from replay.keeping import beginning
from replay.verifying import Span
from services.ledger.database import driver_url
from services.ledger.exporting import Begins, export
from shared.contracts.events import RequestAssigned, RouterLost
from shared.contracts.ids import client_digest
from tests.support.replica import Replica, eventually, witness

PACE = {"VERTUMNUS_SPEEDUP": "200"}
VOCABULARY = 2_000

CLIENT_ID = "who-reads-this-knows-me"
API_KEY = "sk-nobody-may-see-this"
MARK = [1_999, 1_873, 1_777, 1_601, 1_999, 1_543, 1_321, 1_009]
"""How each prompt begins."""


class VerifyRig:
    """A pool of one modelled node, three routers, both leaders and a ledger."""

    def __init__(self, nats: EmbeddedNats, url: str, directory: Path) -> None:
        key = directory / "block.key"
        key.write_bytes(os.urandom(32))
        modelled = {
            **PACE,
            "VERTUMNUS_ENGINE": "modelled",
            "VERTUMNUS_BLOCK_TOKENS": "16",
            "VERTUMNUS_CONTEXT_TOKENS_MAX": "4096",
            "VERTUMNUS_MODELLED_VOCABULARY": str(VOCABULARY),
        }
        front = {**PACE, "VERTUMNUS_BLOCK_KEY_FILE": str(key)}
        self.routers = [Replica("router", nats, directory, str(n), **front) for n in range(3)]
        self.controller = Replica("controller", nats, directory, VERTUMNUS_COMPOSITION="1,1,2,4")
        self.cachemgr = Replica("cachemgr", nats, directory)
        self.worker = Replica("worker", nats, directory, **modelled)
        self.ledger = Replica("ledger", nats, directory, VERTUMNUS_DATABASE_URL=url, VERTUMNUS_SEAL_EVERY_S="2")
        self.others = [self.controller, self.cachemgr, self.worker, self.ledger]

    def start(self) -> None:
        for each in (*self.others, *self.routers):
            each.start()

    def stop(self) -> None:
        for each in (*self.routers, *self.others):
            each.stop(kill=True)


@pytest.fixture
def rig(nats_server: EmbeddedNats, record_url: str, tmp_path: Path) -> Iterator[VerifyRig]:
    made = VerifyRig(nats_server, record_url, tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


async def ask_on(rig: VerifyRig, chance: random.Random, requests: int) -> None:
    """Prompts that share beginnings, at any router that answers; a router that dies takes its answers along."""
    beginnings = [[chance.randrange(VOCABULARY) for _ in range(320)] for _ in range(5)]
    async with httpx.AsyncClient(timeout=30) as client:

        async def ask(router: Replica, prompt: list[int]) -> None:
            body = {"model": "modelled", "prompt": prompt, "max_tokens": 2}
            known = {"x-request-id": CLIENT_ID, "authorization": f"Bearer {API_KEY}"}
            how = chance.choice(("completed", "cancelled", None, None, None))
            try:
                if how is None:
                    await client.post(f"{router.url}/v1/completions", json=body, headers=known)
                    return
                placed = await client.post(f"{router.url}/v1/placements", json=body, headers=known)
                if placed.is_success:
                    await client.post(f"{router.url}/v1/placements/{placed.json()['id']}/{how}", json={"ttft_ms": 5})
            except httpx.TransportError:
                return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(requests):
                more = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(10, 400))]
                prompt = MARK + chance.choice(beginnings)[: chance.randrange(100, 320)] + more
                tasks.create_task(ask(chance.choice(rig.routers), prompt))
                await asyncio.sleep(chance.uniform(0, 0.02))


def marks() -> Iterator[bytes]:
    """What a prompt, its client and his key would look like in an event, in any form that one has."""
    yield from (CLIENT_ID.encode(), API_KEY.encode())
    yield json.dumps(MARK, separators=(",", ":")).encode()[1:-1]
    for packed in (struct.pack(f"<{len(MARK)}I", *MARK), struct.pack(f"<{len(MARK)}H", *MARK)):
        for offset in range(3):  # base64 has three forms of the same bytes, by where they begin
            yield base64.b64encode(bytes(offset) + packed)[4:-4]


async def check_privacy(database_url: str) -> None:
    """No prompt, no token, no key and no client's own id is in any event of any service, in a read model, snapshot or kept
    state, or in a file that is made of them."""
    connection = await asyncpg.connect(driver_url(database_url))
    tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    places: dict[str, bytes] = {}
    for (table,) in tables:
        rows = [row.values() for row in await connection.fetch(f"SELECT * FROM {table}")]
        values = [each if isinstance(each, bytes) else str(each).encode() for row in rows for each in row]
        places[table] = b"\n".join(values)
    sources = {row["source"].split("-")[0] for row in await connection.fetch("SELECT source FROM sources")}
    last_seq = await connection.fetchval("SELECT max(stream_seq) FROM checkpoints")
    await connection.close()
    whole, part = io.BytesIO(), io.BytesIO()
    await export(database_url, whole)
    await export(database_url, part, begins=Begins(*await beginning(database_url, Span(from_seq=last_seq))))
    places |= {"whole": gzip.decompress(whole.getvalue()), "part": gzip.decompress(part.getvalue())}
    assert sources == {"router", "controller", "cachemgr", "worker", "ledger"}
    assert {"decisions", "snapshot_rows", "states"} <= {
        name for name, content in places.items() if len(content) > 1_000
    }
    assert not {(name, mark) for name, content in places.items() for mark in marks() if mark in content}
    assert client_digest(CLIENT_ID).encode() in places["decisions"], "the marked requests are there"


async def test_decisions_of_three_routers_come_out_again_after_crashes(
    rig: VerifyRig, nats_server: EmbeddedNats, record_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERTUMNUS_DATABASE_URL", record_url)
    chance = random.Random(1)
    async with witness(nats_server) as seen:
        await eventually(lambda: all(each.ready() for each in rig.routers))
        for victim in (rig.routers[0], rig.cachemgr, rig.controller, rig.worker, None):
            asking = asyncio.create_task(ask_on(rig, chance, 80))
            await asyncio.sleep(0.4)
            if victim is not None:
                victim.stop(kill=True)
                await asyncio.sleep(0.2)
                victim.start()
            await asking
            await eventually(lambda: all(each.ready() for each in rig.routers))
        await eventually(lambda: seen.all(RouterLost))
        placed = len(seen.all(RequestAssigned))
        assert placed > 200
        runner = CliRunner()

        def verified() -> dict[str, object]:
            """While they go on: what is compared is one snapshot."""
            result = runner.invoke(app, ["verify", "--deep", "--keep", "--json"])
            found: dict[str, object] = json.loads(result.stdout)
            assert result.exit_code == 0, found["differences"]
            return found

        await ask_on(rig, chance, 40)
        found = await asyncio.to_thread(verified)
        while found["checked"].get("request-assigned", 0) < placed:  # type: ignore[attr-defined]
            await asyncio.sleep(0.2)
            found = await asyncio.to_thread(verified)
    await check_privacy(record_url)
    checked = found["checked"]
    assert isinstance(checked, dict)
    assert found["skipped"] == []
    assert checked["request-assigned"] == checked[RECORDED_INPUTS]
    for kind in ("cache-scan-completed", "epoch-committed", "router-lost", "leadership-taken", "request-completed"):
        assert checked[kind], checked
    shown = await asyncio.to_thread(runner.invoke, app, ["verify"])
    assert "decisions come out again" in shown.stdout
    first = await asyncio.to_thread(runner.invoke, app, ["verify", "--to", "1", "--json"])
    assert json.loads(first.stdout)["checked"].keys() <= {"leadership-taken", "cache-leadership-taken"}
    none = await asyncio.to_thread(runner.invoke, app, ["verify", "--from", "2000-01-01", "--to", "2000-01-02"])
    assert none.exit_code == 1
    assert "no decision to check" in none.stdout
    bad = await asyncio.to_thread(runner.invoke, app, ["verify", "--from", "yesterday"])
    assert bad.exit_code == 2
    assert "neither a sequence nor a time" in bad.output
