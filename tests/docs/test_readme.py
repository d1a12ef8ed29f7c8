"""What the documentation tells a reader to do can be done: commands, options, targets, variables and links exist."""

import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings
from typer.core import TyperGroup
from typer.main import get_command

from cli.main import app

ROOT = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PAGES = [name for name in TRACKED if name.endswith(".md")]
COMMANDS = get_command(app)

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```\w*\n(.*?)^```$|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?<![\w/-])(?:\.venv/bin/)?vertumnus ([a-z][^#&|`\n]*)")
NAMED = re.compile(r'^[A-Z]+ = "VERTUMNUS_([A-Z_]+)"', re.MULTILINE)
VARIABLE = re.compile(r"\bVERTUMNUS_([A-Z][A-Z_]*[A-Z])\b")


def page(name: str) -> str:
    return (ROOT / name).read_text()


def codes(text: str) -> Iterator[str]:
    """Code blocks and code in lines, continued lines joined."""
    for block, inline in CODE.findall(text):
        yield (block or inline).replace("\\\n", " ")


def commands(text: str) -> Iterator[str]:
    """What stands behind `vertumnus` wherever code calls it."""
    for code in codes(text):
        yield from (found.strip() for found in COMMAND.findall(code))


def refusal(words: list[str]) -> str | None:
    """Why the command line would not know these words; None if it does."""
    command = COMMANDS
    while isinstance(command, TyperGroup):
        if not words or words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"no option {', '.join(unknown)}" if unknown else None


def anchors(name: str) -> set[str]:
    """The anchors of a page's headings, as they are made on the forge: lower case, no punctuation, dashes for blanks."""
    headings = re.findall(r"^#+ (.+)$", page(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_checks_below_notice_what_is_wrong() -> None:
    text = "`vertumnus trace sent x` and `vertumnus up --engin torch`\n```\n.venv/bin/vertumnus doctor --json  # fine\n```\n"
    found = list(commands(text))
    assert found == ["trace sent x", "up --engin torch", "doctor --json"]
    assert [refusal(shlex.split(each)) for each in found] == ["no command 'sent'", "no option --engin", None]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in LINK.findall(page(name)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), f"{name}: {target} leads nowhere"
        if anchor:
            assert anchor in anchors(str(found.resolve().relative_to(ROOT))), f"{name}: {target}: no such heading"


@pytest.mark.parametrize("name", ["README.md", *(each for each in PAGES if each.startswith("docs/"))])
def test_every_file_that_is_named_exists(name: str) -> None:
    for code in codes(page(name)):
        if re.fullmatch(r"(docs|bench|deploy|examples|tests|services|shared|cli)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{name}: {code} does not exist"


@pytest.mark.parametrize("name", PAGES)
def test_every_command_and_option_exists(name: str) -> None:
    wrong = {each: why for each in commands(page(name)) if (why := refusal(shlex.split(each)))}
    assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("name", PAGES)
def test_every_target_of_make_exists(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE)
    named = {word for code in codes(page(name)) for word in re.findall(r"(?:^|\s)make ([a-z-]+)\b", code)}
    assert named <= set(targets), name


@pytest.mark.parametrize("name", PAGES)
def test_every_variable_is_a_setting_of_something(name: str) -> None:
    modules = [each[:-3].replace("/", ".") for each in TRACKED if each.endswith("/settings.py")]
    known = {
        field.upper()
        for module in modules
        for each in vars(importlib.import_module(module)).values()
        if isinstance(each, type) and issubclass(each, BaseSettings)
        for field in each.model_fields
    }
    # What runs inside other programs cannot have our class of settings, and names its variables itself.
    known |= {name for each in TRACKED if each.endswith("/settings.py") for name in NAMED.findall(page(each))}
    assert {"DATA_DIR", "SGLANG"} <= known
    assert set(VARIABLE.findall(page(name))) <= known, name
