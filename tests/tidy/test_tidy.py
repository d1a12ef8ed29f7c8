"""Rules of the house that no linter knows. Each failure names the file and what to do."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
SOURCES = [
    f
    for f in TRACKED
    if f.endswith(".py") and f.split("/")[0] in {"shared", "services", "cli", "migrations", "simulation"}
]
TEXTS = [
    f
    for f in TRACKED
    if f.endswith((".py", ".md", ".toml", ".yml", ".yaml")) or Path(f).name in {"Makefile", "Dockerfile"}
]

LINES_MAX = 300
"""A file that outgrows this holds two things (docs: CONTRIBUTING.md)."""


def read(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_file_fits_in_the_head(name: str) -> None:
    assert len(read(name).splitlines()) <= LINES_MAX, f"{name}: split it; {LINES_MAX} lines is the limit"


@pytest.mark.parametrize("name", [f for f in SOURCES if read(f).strip()])
def test_a_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(ast.parse(read(name))), f"{name}: begin with a docstring"


@pytest.mark.parametrize("name", SOURCES)
def test_environment_is_read_in_settings_only(name: str) -> None:
    if Path(name).name == "settings.py" or name.startswith("cli/embedded/"):
        return
    assert not re.search(r"os\.environ|os\.getenv|from os import .*environ", read(name)), (
        f"{name}: move it to settings.py"
    )


@pytest.mark.parametrize("name", SOURCES)
def test_the_clock_is_read_in_one_place(name: str) -> None:
    if name == "shared/runtime/clock.py" or Path(name).name == "__main__.py" or name.startswith("cli/"):
        return
    tree = ast.parse(read(name))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "uuid4", "uuid.uuid4"}
    assert not calls & clocks, f"{name}: take a Clock or an id as an argument, not {calls & clocks}"


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_unfinished_is_committed(name: str) -> None:
    if name == "tests/tidy/test_tidy.py":
        return
    found = re.search(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError", read(name))
    assert not found, f"{name}: finish it or take it out: {found}"


@pytest.mark.parametrize("name", SOURCES)
def test_no_error_is_swallowed(name: str) -> None:
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert node.type is not None, f"{name}:{node.lineno}: name the exception"
            assert not (silent and caught in {"Exception", "BaseException"}), (
                f"{name}:{node.lineno}: handle it or let it go"
            )


def test_the_import_name_shared_is_ours() -> None:
    assert Path(str(importlib.import_module("shared").__file__)).is_relative_to(ROOT)


def test_main_modules_only_wire() -> None:
    for name in SOURCES:
        if name.startswith("services/") and Path(name).name == "__main__.py":
            assert len(read(name).splitlines()) < 60, f"{name}: wiring only"
