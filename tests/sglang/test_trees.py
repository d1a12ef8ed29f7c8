"""The plug-in's tree operations on both of SGLang's tree cores, without a server."""

import subprocess
from pathlib import Path

from tests.sglang.adapter_requests import ON_REAL_SERVERS
from tests.support.adapter_servers import environment_of, python

pytestmark = ON_REAL_SERVERS

SEEDS = 40

BREAKS = """
from types import SimpleNamespace
from services.worker.engine.sglang.plugin import mailbox, unit, wire

class Broken:
    @property
    def token_to_kv_pool_allocator(self):
        raise ValueError("the tree has come apart")

unit.unit, unit.units = lambda: 0, lambda: 1
published = SimpleNamespace(publish_kv_events=lambda: None)
numbers = wire.encode(wire.Evict(1, (1,)))
ours = unit.Unit(None, mailbox.Mailbox(), None)
scheduler = SimpleNamespace(tree_cache=Broken(), kv_events_publisher=published)
assert not ours.verb(None, scheduler, SimpleNamespace(server_args=numbers)).updated, "the controller has not seen it"
ours.verb(None, scheduler, SimpleNamespace(server_args=wire.tell(numbers, wire.InForce((1,)))))
"""
"""A verb that is refused, and one in the middle of which something breaks."""


def in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In SGLang's interpreter."""
    return subprocess.run(
        [str(python()), *arguments], env=environment_of(1), capture_output=True, text=True, check=False
    )


def test_trees_stay_equal_after_a_merge_whatever_happens() -> None:
    done = in_process(str(Path(__file__).with_name("tree_in_process.py")), str(SEEDS))
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-4000:]


def test_a_unit_in_which_a_verb_breaks_ends_instead_of_refusing_it() -> None:
    """Its mates may have carried it out: from then on their trees would differ."""
    done = in_process("-c", BREAKS)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: the tree has come apart\n"), done.stderr[-4000:]
