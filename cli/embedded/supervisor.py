"""Starts children in order, keeps them running, stops them in reverse order."""

import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from cli.embedded.processes import StartFailed, kill_group, rotate_log, tail
from cli.embedded.restarts import Restarts

POLL_S = 0.1
READY_LIMIT_S = 120.0
"""Eight ranks that import torch and map the weights on a loaded two-core machine; an idle one takes a third."""

TELL_AFTER_S = 10.0
"""A start that takes longer says what it waits for."""

TELL_AGAIN_S = 10.0
"""And what differs from that in numbers alone, such as how much is read, no sooner than after so long."""


class Child(Protocol):
    """A process the supervisor keeps: `EmbeddedNats`, `EmbeddedPostgres`, `ServiceProcess`."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def why_not_ready(self) -> str: ...

    def start(self) -> None: ...

    def ready(self) -> bool: ...

    def exit_status(self) -> int | None: ...

    def stop(self, *, kill: bool = False) -> None: ...


class Interrupted(Exception):
    """The user asked to stop while the system was starting."""


class GaveUp(Exception):
    """A child crashed again and again. The message names it and its log."""


@dataclass(slots=True)
class _Kept:
    """A child, its crashes, and when it was or is to be started (monotonic seconds)."""

    child: Child
    started_s: float
    restarts: Restarts = field(default_factory=Restarts)
    due_s: float | None = None
    ready: bool = True


class Supervisor:
    """`start` any number of times, then `watch`, or `tend` again and again, then `stop`; `stop` also after a failure.

    `say` gets one sentence per thing that the user should know. `interrupted` is set to end `start` and `watch`.
    """

    def __init__(self, say: Callable[[str], None], interrupted: threading.Event) -> None:
        self._say = say
        self._interrupted = interrupted
        self._kept: list[_Kept] = []

    def start(self, children: Sequence[Child], limit_s: float = READY_LIMIT_S) -> None:
        """Start `children` side by side and wait until all are ready. Errors: StartFailed; Interrupted."""
        begun = time.monotonic()
        for child in children:
            self._check_interrupted()
            self._kept.append(_Kept(child, started_s=time.monotonic()))
            child.start()
        waiting = list(children)
        told: set[str] = set()
        tell_s: dict[str, float] = {}
        while waiting:
            for child in [child for child in waiting if child.ready()]:
                self._say(f"{child.name} is ready ({time.monotonic() - begun:.1f} s)")
                waiting.remove(child)
            self._refuse_lost(waiting, time.monotonic() - begun, limit_s)
            if time.monotonic() - begun > TELL_AFTER_S:
                for child in waiting:
                    line = f"{child.name} is not ready: {child.why_not_ready}"
                    but_for_numbers = re.sub(r"\d+", "", line)
                    if line not in told and time.monotonic() >= tell_s.get(but_for_numbers, 0):
                        self._say(line)
                        told.add(line)
                        tell_s[but_for_numbers] = time.monotonic() + TELL_AGAIN_S
            self._interrupted.wait(POLL_S if waiting else 0)
            self._check_interrupted()

    def watch(self) -> None:
        """Start crashed children again until interrupted. Errors: GaveUp."""
        while not self._interrupted.wait(POLL_S):
            self.tend()

    def tend(self) -> None:
        """Look once at every child, and start again what has crashed and is due. Errors: GaveUp."""
        for kept in self._kept:
            self._tend(kept, time.monotonic())

    def stop(self) -> None:
        """Stop every child, the last started first."""
        if self._kept:
            # Only who has pressed it once is told of the second.
            self._say("stopping; a second Ctrl-C ends everything at once" if self._interrupted.is_set() else "stopping")
        while self._kept:
            child = self._kept[-1].child
            child.stop()
            self._say(f"{child.name} has stopped")
            self._kept.pop()

    def kill(self) -> None:
        """End every child at once. For a signal handler: it waits for nothing, `stop` goes on and collects them."""
        for kept in self._kept:
            if kept.child.pid is not None:
                kill_group(kept.child.pid)

    def _check_interrupted(self) -> None:
        if self._interrupted.is_set():
            raise Interrupted

    def _refuse_lost(self, waiting: Sequence[Child], waited_s: float, limit_s: float) -> None:
        """StartFailed if a child that others wait for has ended, or has had its time."""
        for child in waiting:
            status = child.exit_status()
            if status is not None:
                raise StartFailed(
                    f"{child.name} ended with status {status} while starting; {child.log} says:\n{tail(child.log)}"
                )
            if waited_s > limit_s:
                raise StartFailed(
                    f"{child.name} was not ready within {limit_s:.0f} s: {child.why_not_ready}; {child.log} says:\n"
                    f"{tail(child.log)}"
                )

    def _tend(self, kept: _Kept, now_s: float) -> None:
        """One look at one child."""
        child = kept.child
        if kept.due_s is not None:
            if now_s >= kept.due_s:
                self._start_again(kept, now_s)
            return
        rotate_log(child.log)
        status = child.exit_status()
        if status is not None:
            self._crashed(kept, f"ended with status {status}", now_s)
        elif not kept.ready and child.ready():
            kept.ready = True
            self._say(f"{child.name} is ready again ({now_s - kept.started_s:.1f} s)")

    def _crashed(self, kept: _Kept, how: str, now_s: float) -> None:
        """Collect what is left of a child and plan its next start. Errors: GaveUp."""
        child = kept.child
        child.stop(kill=True)
        kept.ready = False
        kept.restarts = kept.restarts.after_crash(now_s - kept.started_s)
        delay_s = kept.restarts.delay_s
        if delay_s is None:
            raise GaveUp(
                f"{child.name} {how}, {kept.restarts.in_a_row} times in a row; {child.log} says:\n{tail(child.log)}"
            )
        kept.due_s = now_s + delay_s
        self._say(f"{child.name} {how}; starting it again in {delay_s:.1f} s (see {child.log})")

    def _start_again(self, kept: _Kept, now_s: float) -> None:
        kept.due_s = None
        kept.started_s = now_s
        try:
            kept.child.start()
        except StartFailed as failure:
            self._crashed(kept, str(failure).partition(";")[0], time.monotonic())


def stop_on_signals(interrupted: threading.Event, supervisor: Supervisor) -> None:
    """From now on Ctrl-C, SIGTERM and the end of the terminal ask for an orderly stop, and a second one ends everything."""

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the shape that signal handlers have
        if interrupted.is_set():
            supervisor.kill()
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    # Under nohup the end of the terminal is to be ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_signal)
