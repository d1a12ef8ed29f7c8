"""Rules of the house that no linter knows. Each failure names the files and what to do."""

import ast
import importlib
import re
import subprocess
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PACKAGES = {"shared", "services", "replay", "cli", "migrations", "simulation"}
SOURCES = {f: (ROOT / f).read_text() for f in TRACKED if f.endswith(".py") and f.split("/")[0] in PACKAGES}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}
TEXTS = [f for f in TRACKED if f.endswith((".py", ".md", ".toml", ".yml", ".yaml")) or f in {"Makefile", "Dockerfile"}]

LINES_MAX = 300
"""A file that outgrows this holds two things."""


def test_a_source_file_fits_in_the_head() -> None:
    long = {name: lines for name, text in SOURCES.items() if (lines := len(text.splitlines())) > LINES_MAX}
    assert not long, f"split them; {LINES_MAX} lines is the limit"


def test_a_module_says_what_it_is_for() -> None:
    silent = [name for name, tree in TREES.items() if SOURCES[name].strip() and not ast.get_docstring(tree)]
    assert not silent, "begin them with a docstring"


def test_environment_is_read_in_settings_only() -> None:
    reads = re.compile(r"os\.environ|os\.getenv|from os import .*environ")
    found = [
        name
        for name, text in SOURCES.items()
        if reads.search(text) and Path(name).name != "settings.py" and not name.startswith("cli/embedded/")
    ]
    assert not found, "move it to settings.py"


def test_no_test_measures_the_machine() -> None:
    hasty = re.compile(r"assert .*(monotonic|perf_counter|took_s|elapsed).* <=? (\d+(\.\d+)?)\b")
    found = [
        f"{name}: {found.group()}"
        for name in TRACKED
        if name.startswith("tests/") and name.endswith(".py")
        for found in hasty.finditer((ROOT / name).read_text())
        if float(found.group(2)) < 30
    ]
    assert not found, "assert what happened; a limit on time only tells a hang, so make it 30 s or more"


def test_the_clock_is_read_in_one_place() -> None:
    clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "uuid4", "uuid.uuid4"}
    found = [
        name
        for name, tree in TREES.items()
        if {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} & clocks
        and name != "shared/runtime/clock.py"
        and Path(name).name != "__main__.py"
        and not name.startswith("cli/")
    ]
    assert not found, "take a Clock or an id as an argument"


def test_nothing_unfinished_is_committed() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError")
    found = [
        name for name in TEXTS if name != "tests/tidy/test_tidy.py" and unfinished.search((ROOT / name).read_text())
    ]
    assert not found, "finish it or take it out"


def test_no_error_is_swallowed() -> None:
    handlers = [
        (name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)
    ]
    assert handlers
    found = [
        f"{name}:{node.lineno}"
        for name, node in handlers
        if node.type is None
        or (
            ast.unparse(node.type) in {"Exception", "BaseException"}
            and all(isinstance(statement, ast.Pass) for statement in node.body)
        )
    ]
    assert not found, "name the exception and handle it, or let it go"


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    taken = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    reasons = (ROOT / "docs/adr/0012-dependencies.md").read_text()
    silent = [name for name in taken if f"`{name.partition('[')[0]}`" not in reasons]
    assert not silent, "give them a row in docs/adr/0012-dependencies.md"


def test_the_import_name_shared_is_ours() -> None:
    assert Path(str(importlib.import_module("shared").__file__)).is_relative_to(ROOT)


def test_main_modules_only_wire() -> None:
    mains = {
        name: text for name, text in SOURCES.items() if name.startswith("services/") and name.endswith("__main__.py")
    }
    assert len(mains) == 5
    assert not [name for name, text in mains.items() if len(text.splitlines()) >= 60], "wiring only"


def test_no_two_test_modules_have_one_name() -> None:
    """They are imported by their file's name alone: the second would not be collected beside the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]
