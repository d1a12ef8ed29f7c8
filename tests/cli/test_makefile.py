"""The Makefile is the front door: what it says to somebody who has just arrived."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=directory, capture_output=True, text=True, check=False)


def test_make_alone_prints_the_targets() -> None:
    printed = make(ROOT).stdout
    assert re.findall(r"make (\w+) ", printed) == [
        "help", "install", "model", "demo", "up", "profile", "tables", "test", "constraints", "docs", "clean",
    ]  # fmt: skip


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    refused = make(tmp_path, "install", f"PYTHON={old}")
    assert refused.returncode != 0
    assert f"needs Python 3.11 or newer; '{old}' is Python 3.9.1" in refused.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_make_test_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail"
    assert commands[-1].startswith("exec make test")
    assert len(commands) == 3
