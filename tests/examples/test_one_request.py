"""The example prints the same log, every time."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_prints_what_is_expected(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "one_request.py"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout == (Path(__file__).parent / "one_request.expected.txt").read_text()


def test_the_example_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "examples" / "one_request.py").read_text().splitlines()) < 150
