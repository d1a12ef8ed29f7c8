"""One service of Vertumnus as a child process."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cli.embedded.loopback import HOST, refusal
from cli.embedded.processes import end_group, spawn, stop

STOP_LIMIT_S = 40.0
"""A router lets its open streams end, for up to 30 s (`shared.runtime.service`), and hangs up on the rest within 5 s."""


class ServiceProcess:
    """`python -m <module>`, told by its environment to answer HTTP on `port`."""

    def __init__(self, name: str, module: str, *, env: Mapping[str, str], port: int, log: Path) -> None:
        self.name = name
        self.log = log
        self.port = port
        self._module = module
        self._env = {**env, "VERTUMNUS_HTTP_HOST": HOST, "VERTUMNUS_HTTP_PORT": str(port)}
        self._process: subprocess.Popen[bytes] | None = None
        self.why_not_ready = ""

    @property
    def url(self) -> str:
        """Where the service answers HTTP."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process. It answers later: ask `ready`."""
        assert self._process is None, "start is called on a stopped service"
        # -P: a directory named `shared` where the user happens to stand must not hide ours.
        self._process = spawn([sys.executable, "-P", "-m", self._module], log=self.log, env=self._env)

    def ready(self) -> bool:
        """Whether the service says that it can do its work."""
        self.why_not_ready = "it does not run" if self._process is None else refusal(self.port, "/readyz") or ""
        return not self.why_not_ready

    def exit_status(self) -> int | None:
        """The status the process ended with, None while it runs or has been stopped."""
        return None if self._process is None else self._process.poll()

    def stop(self, *, kill: bool = False) -> None:
        """Stop the process; `kill` ends it as a crash would. Nothing happens if it does not run."""
        if self._process is None:
            return
        if kill:
            end_group(self._process)
        else:
            stop(self._process, limit_s=STOP_LIMIT_S)
        self._process = None
