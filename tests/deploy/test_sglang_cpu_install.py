"""What the installation of SGLang for development leaves when it is broken off. All of it runs in `make sglang-cpu`."""

import runpy
import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "deploy/sglang-cpu/install.py"


def command(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_libraries_are_all_there_or_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two packages cannot be unpacked."""
    commands, into = tmp_path / "bin", tmp_path / "debian"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    unpack = runpy.run_path(str(INSTALL))["_unpack_debian"]
    command(commands, "apt-get", "touch 1.deb 2.deb")
    command(commands, "dpkg", 'mkdir -p "$3"; [ ! -e "$3/one" ] || exit 1; touch "$3/one"')
    with pytest.raises(subprocess.CalledProcessError):
        unpack(into)
    command(commands, "dpkg", 'mkdir -p "$3"; touch "$3/$(basename "$2")"')
    assert unpack(into)
    assert sorted(path.name for path in into.iterdir()) == ["1.deb", "2.deb"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "debian"]
    command(commands, "apt-get", "exit 1")
    assert unpack(into), "nothing is downloaded again"
