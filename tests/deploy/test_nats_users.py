"""deploy/nats/nats.conf on a real server: each service may publish what it decides, and nobody what another decides."""

import asyncio
from pathlib import Path

import nats
import pytest
from nats.js.errors import APIError, NoStreamResponseError

from shared.contracts.envelope import Channel
from shared.contracts.ids import NodeId, RequestId, RouterId
from shared.contracts.subjects import Subjects
from tests.support.pool_server import PoolServer, make_secrets

SUBJECTS = Subjects("main")
CHANNEL_OWNERS = {
    Channel.REQUESTS: "router",
    Channel.CONTROL: "controller",
    Channel.CACHE_CONTROL: "cachemgr",
    Channel.CACHE: "worker",
    Channel.WORKERS: "worker",
    Channel.LEDGER: "ledger",
}
USERS = sorted(set(CHANNEL_OWNERS.values()))


async def test_each_event_has_one_sender(pool_server: PoolServer) -> None:
    for user in USERS:
        refused: list[str] = []
        client = await pool_server.connect(user, refused)
        for channel, owner in CHANNEL_OWNERS.items():
            refused.clear()
            await client.publish(SUBJECTS.event(channel, "x"), b"")
            await client.flush()
            await asyncio.sleep(0.02)
            assert bool(refused) == (user != owner), f"{user} publishes {channel}: {refused}"
        await client.close()


@pytest.mark.parametrize(
    ("subject", "allowed"),
    [
        (SUBJECTS.agent(NodeId("n0")), {"router", "controller", "cachemgr"}),
        (SUBJECTS.load(NodeId("n0")), {"worker"}),
        (SUBJECTS.alive(RouterId("r")), {"router"}),
        (SUBJECTS.claim(RouterId("r")), {"worker"}),
        (SUBJECTS.frames(RouterId("r"), RequestId("q")), {"worker"}),
        ("$KV.vertumnus-main-leases.controller", {"controller"}),
        ("$KV.vertumnus-main-leases.cachemgr", {"cachemgr"}),
        ("$KV.vertumnus-main-keepsake.pool", {"controller"}),
        ("$KV.vertumnus-main-snapshots.cachemgr.1.17", {"cachemgr"}),
    ],
)
async def test_each_message_has_its_senders(pool_server: PoolServer, subject: str, allowed: set[str]) -> None:
    for user in USERS:
        refused: list[str] = []
        client = await pool_server.connect(user, refused)
        await client.publish(subject, b"")
        await client.flush()
        await asyncio.sleep(0.02)
        assert bool(refused) == (user not in allowed), f"{user} publishes {subject}: {refused}"
        await client.close()


async def test_tokens_are_for_routers_and_workers_only(pool_server: PoolServer) -> None:
    for user in USERS:
        refused: list[str] = []
        client = await pool_server.connect(user, refused)
        await client.subscribe("vertumnus.main.frames.>")
        await client.flush()
        await asyncio.sleep(0.02)
        assert bool(refused) == (user not in {"router", "worker"}), f"{user}: {refused}"
        await client.close()


async def test_a_stream_is_made_but_the_log_is_never_deleted(pool_server: PoolServer) -> None:
    client = await pool_server.connect("controller", [])
    stream = client.jetstream(timeout=1)
    await stream.add_stream(name=SUBJECTS.stream, subjects=[SUBJECTS.all_events])
    with pytest.raises((TimeoutError, APIError, NoStreamResponseError, nats.errors.Error)):
        await stream.delete_stream(SUBJECTS.stream)
    with pytest.raises((TimeoutError, APIError, nats.errors.Error)):
        await stream.purge_stream(SUBJECTS.stream)
    assert (await stream.stream_info(SUBJECTS.stream)).config.name == SUBJECTS.stream
    await client.close()


async def test_a_stranger_is_refused(pool_server: PoolServer) -> None:
    with pytest.raises(nats.errors.Error):
        await nats.connect(pool_server.url, allow_reconnect=False, connect_timeout=2)


def test_secrets_are_made_once_and_are_private(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {f"nats.{user}" for user in USERS} < set(first)
    assert {path.stat().st_mode & 0o7 for path in tmp_path.iterdir()} == {0}
    assert (tmp_path / "pgpass").stat().st_mode & 0o777 == 0o600
    (tmp_path / "operator.key").unlink()
    make_secrets(tmp_path)
    second = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert second.pop("operator.key") != first.pop("operator.key")
    assert second == first
