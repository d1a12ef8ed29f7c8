"""deploy/nats/nats.conf on a real server: each service may publish what it decides, and nobody what another decides."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nats
import pytest
from nats.aio.client import Client
from nats.js.errors import APIError, NoStreamResponseError

from cli.embedded.nats import nats_binary
from shared.contracts.envelope import Channel
from shared.contracts.ids import NodeId, RequestId, RouterId
from shared.contracts.subjects import Subjects

ROOT = Path(__file__).resolve().parents[2]
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


class Server(NamedTuple):
    port: int
    secrets: Path

    async def connect(self, user: str, refused: list[str]) -> Client:
        async def error(each: Exception) -> None:
            refused.append(str(each))

        password = (self.secrets / f"nats.{user}").read_text()
        url = f"nats://127.0.0.1:{self.port}"
        return await nats.connect(url, user=user, password=password, error_cb=error, max_reconnect_attempts=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The file as it lies in the container: the include is relative to it. Only address and store are this machine's."""
    root = tmp_path_factory.mktemp("nats-users")
    secrets, config = root / "run/vertumnus/secrets", root / "etc/nats/nats.conf"
    for directory in (secrets, config.parent, root / "store"):
        directory.mkdir(parents=True)
    make_secrets(secrets)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    here = {"0.0.0.0:4222": f"127.0.0.1:{port}", "0.0.0.0:8222": "127.0.0.1:-1", "/var/lib/nats": str(root / "store")}
    text = (ROOT / "deploy/nats/nats.conf").read_text()
    for there, ours in here.items():
        assert text.count(there) == 1
        text = text.replace(there, ours)
    config.write_text(text)
    with (root / "log").open("wb") as log:
        process = subprocess.Popen([nats_binary(), "-c", config], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 10
        while not _listens(port):
            assert process.poll() is None, (root / "log").read_text()
            assert time.monotonic() < deadline, (root / "log").read_text()
            time.sleep(0.02)
        yield Server(port, secrets)
    finally:
        process.terminate()
        process.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_secrets(directory: Path) -> None:
    subprocess.run([sys.executable, ROOT / "deploy/compose/make_secrets.py", directory], check=True)


async def test_each_event_has_one_sender(server: Server) -> None:
    for user in USERS:
        refused: list[str] = []
        client = await server.connect(user, refused)
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
    ],
)
async def test_each_message_has_its_senders(server: Server, subject: str, allowed: set[str]) -> None:
    for user in USERS:
        refused: list[str] = []
        client = await server.connect(user, refused)
        await client.publish(subject, b"")
        await client.flush()
        await asyncio.sleep(0.02)
        assert bool(refused) == (user not in allowed), f"{user} publishes {subject}: {refused}"
        await client.close()


async def test_tokens_are_for_routers_and_workers_only(server: Server) -> None:
    for user in USERS:
        refused: list[str] = []
        client = await server.connect(user, refused)
        await client.subscribe("vertumnus.main.frames.>")
        await client.flush()
        await asyncio.sleep(0.02)
        assert bool(refused) == (user not in {"router", "worker"}), f"{user}: {refused}"
        await client.close()


async def test_a_stream_is_made_but_the_log_is_never_deleted(server: Server) -> None:
    client = await server.connect("controller", [])
    stream = client.jetstream(timeout=1)
    await stream.add_stream(name=SUBJECTS.stream, subjects=[SUBJECTS.all_events])
    with pytest.raises((TimeoutError, APIError, NoStreamResponseError, nats.errors.Error)):
        await stream.delete_stream(SUBJECTS.stream)
    with pytest.raises((TimeoutError, APIError, nats.errors.Error)):
        await stream.purge_stream(SUBJECTS.stream)
    assert (await stream.stream_info(SUBJECTS.stream)).config.name == SUBJECTS.stream
    await client.close()


async def test_a_stranger_is_refused(server: Server) -> None:
    with pytest.raises(nats.errors.Error):
        await nats.connect(f"nats://127.0.0.1:{server.port}", allow_reconnect=False, connect_timeout=2)


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
