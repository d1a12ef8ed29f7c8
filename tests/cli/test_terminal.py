"""What all commands print alike: width in a pipe, errors without numbers, silence when the reader leaves."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.events import run
from cli.terminal import PIPED_COLUMNS, output, reason


def test_a_pipe_is_as_wide_as_our_tables() -> None:
    assert output().width >= PIPED_COLUMNS


def test_an_error_names_the_file_and_not_the_number(tmp_path: Path) -> None:
    missing = tmp_path / "no.json"
    with pytest.raises(OSError) as raised:
        missing.read_text()
    assert reason(raised.value) == f"{missing}: No such file or directory"
    assert reason(ValueError("a: too large")) == "a: too large"


def test_a_reader_that_leaves_is_no_failure_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    async def printing_into_nothing() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        run(printing_into_nothing)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("asked", [["status"], ["events", "tail"], ["verify"]])
def test_where_nothing_runs_one_line_says_where_it_looked(asked: list[str], tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("vertumnus")), *asked]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"nothing runs in {tmp_path / '.vertumnus'}: ")
    assert refused.stderr.count("\n") == 1
