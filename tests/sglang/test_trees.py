"""The plug-in's tree operations on both of SGLang's tree cores, without a server."""

import os
import subprocess
from pathlib import Path

from tests.support.sglang_servers import PYTHON, ROOT

SEEDS = 40


def test_trees_stay_equal_after_a_merge_whatever_happens() -> None:
    script = Path(__file__).with_name("tree_in_process.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_PLATFORM": "vertumnus_cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, script, str(SEEDS)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-4000:]
