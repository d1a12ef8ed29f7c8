"""Three NATS servers that keep one replicated stream, on loopback."""

import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from cli.embedded.nats import nats_binary

SERVERS = 3


class Cluster:
    """`kill` and `start` single servers; their stores outlive them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ports = _free_ports(2 * SERVERS)
        self._client_ports, self._route_ports = ports[:SERVERS], ports[SERVERS:]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._client_ports)

    def start(self, number: int) -> None:
        folder = self._directory / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in self._route_ports)
        config = folder / "nats.conf"
        config.write_text(
            f"""
server_name: n{number}
listen: "127.0.0.1:{self._client_ports[number]}"
jetstream {{ store_dir: "{folder / "store"}" }}
cluster {{ name: test, listen: "127.0.0.1:{self._route_ports[number]}", routes: [{routes}] }}
"""
        )
        with (folder / "log").open("ab") as log:
            self._running[number] = subprocess.Popen([nats_binary(), "-c", config], stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        process = self._running.pop(number)
        process.kill()
        process.wait()

    def __enter__(self) -> Self:
        for number in range(SERVERS):
            self.start(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in tuple(self._running):
            self.kill(number)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
