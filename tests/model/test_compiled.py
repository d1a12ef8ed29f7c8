"""Machine code that is kept, where what is kept or the disk is not what it should be."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOUBLED = """
from shared.model.compiled import compiled

@compiled("int64(int64)")
def doubled(number):
    return 2 * number
"""


@pytest.mark.parametrize("what", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("left_bytes", [0, 20])
def test_what_is_kept_may_have_been_cut_off(tmp_path: Path, what: str, left_bytes: int) -> None:
    source = tmp_path / "doubled.py"
    source.write_text(DOUBLED)
    assert runpy.run_path(str(source))["doubled"](4) == 8
    [kept] = tmp_path.rglob(what)
    kept.write_bytes(kept.read_bytes()[:left_bytes])
    assert runpy.run_path(str(source))["doubled"](4) == 8


def test_a_full_disk_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "doubled.py").write_text(DOUBLED)
    show = "import runpy; print(runpy.run_path('doubled.py')['doubled'](4))"
    command = ["/bin/bash", "-c", 'ulimit -f 0 && exec "$0" -B -c "$1"', sys.executable, show]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "8"
    assert not [*tmp_path.rglob("*.nbc")]
