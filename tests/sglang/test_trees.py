"""The plug-in's tree operations on both of SGLang's tree cores, without a server."""

import subprocess
from pathlib import Path

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.support.adapter_servers import environment_of, python
from tests.support.switching_servers import ROOT

pytestmark = ON_REAL_SERVERS

SEEDS = 40


def test_trees_stay_equal_after_a_merge_whatever_happens() -> None:
    script = Path(__file__).with_name("tree_in_process.py")
    interpreter = python()
    assert interpreter is not None, "checked for the directory"
    environment = environment_of(1) | {"PYTHONPATH": str(ROOT)}
    # -P: beside the script lies a module that is called `requests`.
    command = [interpreter, "-P", script, str(SEEDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-4000:]
