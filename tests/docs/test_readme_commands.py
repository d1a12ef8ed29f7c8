"""What the README tells a newcomer to type, typed: on the modelled engine, with the tokenizer of the default model."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.commands.up import DEFAULT_MODEL
from tests.support.up import Up

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
(SNIPPET,) = (code for language, code in BLOCKS if language == "python")
(LINES,) = (code.splitlines() for language, code in BLOCKS if ".venv/bin/vertumnus" in code)

FASTER = ("--shrink ", "--speed 20 --shrink ")
"""The modelled engine need not be spared."""


@pytest.fixture(scope="module")
def system(smollm2: Path) -> Iterator[Up]:
    """Twenty times as fast as life: the modelled engine talks until it is told to stop, for want of anything to say."""
    directory = Path(tempfile.mkdtemp(prefix="vertumnus-test-"))
    directory.chmod(0o711)
    (directory / "models").mkdir()
    (directory / "models" / smollm2.name).symlink_to(smollm2)
    os.environ["VERTUMNUS_SPEEDUP"] = "20"
    up = Up(directory)
    del os.environ["VERTUMNUS_SPEEDUP"]
    yield up
    status, said = up.end(signal.SIGTERM)
    assert status == 0, said
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def port(system: Up) -> str:
    (found,) = re.findall(r":(\d+)/v1$", system.ready()["api_url"])
    return str(found)


def typed(system: Up, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "VERTUMNUS_DATA_DIR": str(system.directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_snippet_is_answered(system: Up, port: str) -> None:
    served = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"]
    assert DEFAULT_MODEL in SNIPPET
    done = typed(system, "-c", SNIPPET.replace("PORT", port).replace(DEFAULT_MODEL, served))
    assert done.returncode == 0, done.stderr
    *answer, cached = done.stdout.split()
    assert answer
    assert cached == "0"


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[1:3]))
def test_a_command_does_what_it_says(system: Up, port: str, line: str) -> None:
    command, _, _ = line.replace(*FASTER).partition("#")
    program, *words = shlex.split(command)
    assert program == ".venv/bin/vertumnus"
    done = typed(system, "-c", "from cli.main import app; app()", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
