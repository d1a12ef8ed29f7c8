"""`vertumnus up` as a child process of a test."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STOP_LIMIT_S = 90


class Up:
    """One run of the command on `directory`, with the modelled engine unless the options say otherwise."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        python_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        arguments = ["up", "--json", "--data-dir", str(directory), "--engine", "modelled", *options]
        extra = {} if python_path is None else {"PYTHONPATH": str(python_path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from cli.main import app; app()", *arguments],
            env={**os.environ, **(environment or {}), **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """Wait until everything runs; what the command printed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.failed()
        printed: dict[str, Any] = json.loads(line)
        return printed

    def failed(self) -> str:
        """Wait for the command to end by itself; what it said on stderr."""
        return self.process.communicate(timeout=STOP_LIMIT_S)[1]

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Send a signal; the exit status and what was said on stderr."""
        self.process.send_signal(number)
        said = self.failed()
        return self.process.returncode, said

    def children(self) -> dict[int, str]:
        """The command lines of its children by process id. Linux only."""
        pid = self.process.pid
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child): Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in pids}

    def child(self, words: str) -> int:
        """The process id of the one child whose command line holds `words`."""
        (found,) = [pid for pid, line in self.children().items() if words in line]
        return found
