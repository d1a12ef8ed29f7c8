"""A NATS server with the users of deploy/nats/nats.conf, as the containers have it."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import nats
from nats.aio.client import Client

from cli.embedded.nats import nats_binary

ROOT = Path(__file__).resolve().parents[2]


class PoolServer(NamedTuple):
    """Where it listens, and the directory that `make_secrets` filled."""

    port: int
    secrets: Path

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def connect(self, user: str, refused: list[str]) -> Client:
        """As one service; what the server refuses later is put into `refused`."""

        async def error(each: Exception) -> None:
            refused.append(str(each))

        password = (self.secrets / f"nats.{user}").read_text()
        return await nats.connect(self.url, user=user, password=password, error_cb=error, max_reconnect_attempts=0)


@contextmanager
def running_pool_server(root: Path) -> Iterator[PoolServer]:
    """The file as it lies in the container: its include is relative to it. Only addresses and store are this machine's."""
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
        deadline = time.monotonic() + 30
        while not _listens(port):
            assert process.poll() is None, (root / "log").read_text()
            assert time.monotonic() < deadline, (root / "log").read_text()
            time.sleep(0.02)
        yield PoolServer(port, secrets)
    finally:
        process.terminate()
        process.wait(10)


def make_secrets(directory: Path) -> None:
    """As the service `secrets` does."""
    subprocess.run([sys.executable, ROOT / "deploy/compose/make_secrets.py", directory], check=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
