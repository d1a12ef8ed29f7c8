"""Servers are started as the documentation says, as far as SGLang's own command line can tell without a GPU."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_readme import codes, page
from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.support.adapter_servers import environment_of, python

pytestmark = ON_REAL_SERVERS

COMMAND = "sglang.launch_server"
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
PARSE = """
import argparse, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

load_plugins()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for line in sys.stdin:
    parser.parse_args(line.rstrip("\\n").split("\\t"))
"""


@pytest.mark.parametrize("name", ["docs/sglang.md", "deploy/sglang-cpu/README.md"])
def test_sglang_takes_every_option(name: str, tmp_path: Path) -> None:
    """Blocks may be in lists, or indented."""
    text = page(name)
    blocks = [*codes(re.sub("^ +", "", text, flags=re.MULTILINE)), *INDENTED.findall(text)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if COMMAND in line]
    options = [shlex.split(line.partition(COMMAND)[2]) for line in lines]
    given = [each for each in options if each]
    assert given, f"{name} starts no server"
    done = subprocess.run(
        [str(python()), "-c", PARSE],
        input="\n".join("\t".join(each) for each in given),
        env=environment_of(1),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
