"""The whole system, as `vertumnus up` starts it, for benches that ask it over HTTP."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

UP = ("-c", "from cli.main import app; app()", "up", "--json")


class System(NamedTuple):
    """A running one: what `up` says of it, the key of its operator, its process."""

    told: dict[str, Any]
    operator_key: str
    pid: int


@contextmanager
def system(*options: str, **settings: str) -> Iterator[System]:
    """One that is started with these options and environment variables; it and its data are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="vertumnus-bench-") as directory:
        Path(directory).chmod(0o711)
        command = [sys.executable, *UP, *options, "--data-dir", directory]
        environment = {**os.environ, **settings}
        up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert up.stdout is not None
            told = json.loads(up.stdout.readline())
            yield System(told, (Path(directory) / "operator.key").read_text().strip(), up.pid)
        finally:
            up.terminate()
            up.wait()


def modelled(speedup: int, **settings: str) -> AbstractContextManager[System]:
    """One whose engine is modelled and so many times as fast as life."""
    return system("--engine", "modelled", VERTUMNUS_SPEEDUP=str(speedup), **settings)
