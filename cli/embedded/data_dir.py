"""The directory that a system on this machine lives in: who runs there, and how other commands reach it."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cli.embedded.files import secret, write_private
from cli.embedded.processes import is_running


class AlreadyRunning(Exception):
    """Another process runs a system in this directory. The message names its process id."""


class RunningService(BaseModel):
    """One service as other commands see it."""

    model_config = ConfigDict(frozen=True)

    url: str
    log: Path


class RunningSystem(BaseModel):
    """What `run.json` says while a system runs. It holds credentials: only its owner may read it."""

    model_config = ConfigDict(frozen=True)

    pid: int
    nats_url: str
    database_url: str
    operator_key_file: Path
    tokenizer: bool
    services: dict[str, RunningService]

    @property
    def api_url(self) -> str:
        """Where the OpenAI-compatible API answers."""
        return self.services["router"].url

    @property
    def console_url(self) -> str:
        """Where the console answers."""
        return self.services["ledger"].url


class DataDir:
    """The layout of one data directory. Created when first used."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.nats = self.path / "nats"
        self.postgres = self.path / "postgres"
        self.logs = self.path / "log"
        self.models = self.path / "models"
        self._lock = self.path / "lock"
        self._run_file = self.path / "run.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one system. AlreadyRunning while another process does; the kernel frees a dead one's."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read() or "unknown"
                raise AlreadyRunning(
                    f"process {owner} runs a system in {self.path}: stop it, or choose another directory (--data-dir)"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def clear(self) -> None:
        """Remove everything, but for the lock that the caller holds. Errors: OSError."""
        for left in self.path.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left != self._lock:
                left.unlink()
        self.logs.mkdir()

    def block_key_file(self) -> Path:
        """The file of the deployment's block key (`shared.model.blocks`), made at first use and kept with the data."""
        return self._secret_file("block.key")

    def operator_key_file(self) -> Path:
        """The file of the key that operators log in with, made at first use."""
        return self._secret_file("operator.key")

    def _secret_file(self, name: str) -> Path:
        file = self.path / name
        secret(file)
        return file

    def announce(self, system: RunningSystem) -> None:
        """Tell other commands what runs here."""
        write_private(self._run_file, system.model_dump_json(indent=2))

    def withdraw(self) -> None:
        """Nothing runs here any more."""
        self._run_file.unlink(missing_ok=True)

    def running(self) -> RunningSystem | None:
        """What runs here, None if nothing does. A file left by a process that was killed does not count."""
        try:
            system = RunningSystem.model_validate_json(self._run_file.read_text())
        except FileNotFoundError:
            return None
        return system if is_running(system.pid) else None
