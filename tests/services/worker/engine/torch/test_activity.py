"""What the kernel says of processes that compute, wait, and are stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.worker.engine.torch.activity import Activity


@contextmanager
def process(code: str) -> Iterator[int]:
    """Its pid, once it has begun."""
    running = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
    finally:
        running.kill()
        running.wait()


def looks(activity: Activity) -> list[bool]:
    """A few, the first of which only takes the measure."""
    activity.look()
    seen = []
    for _ in range(5):
        time.sleep(0.05)
        seen.append(activity.look())
    return seen


def test_who_computes_is_active_at_every_look() -> None:
    with process("while True: pass") as pid:
        assert all(looks(Activity(pid)))


def test_who_waits_is_not() -> None:
    with process("import time; time.sleep(600)") as pid:
        activity = Activity(pid)
        while activity.look():
            time.sleep(0.05)  # until it has gone to sleep
        assert not any(looks(activity))
        assert not activity.stopped


def test_who_was_stopped_is_not_until_it_goes_on() -> None:
    with process("while True: pass") as pid:
        activity = Activity(pid)
        os.kill(pid, signal.SIGSTOP)
        while not activity.stopped:
            time.sleep(0.01)
            activity.look()
        assert not any(looks(activity))
        assert activity.stopped
        os.kill(pid, signal.SIGCONT)
        assert all(looks(activity))
        assert not activity.stopped


def test_who_is_gone_is_nobody_s_concern() -> None:
    with process("pass") as pid:
        pass
    assert Activity(pid).look()
