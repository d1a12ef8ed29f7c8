"""Faults on demand, for tests: a file `<fault>-<rank>` in the directory that VERTUMNUS_SGLANG_FAULTS names."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLUGIN = "services.worker.engine.sglang.plugin."


class Faults:
    """`refuse`: the rank answers `prepare` with no. `vote-no`: it votes against a commit. `die`: it kills itself before it
    votes. `die-decided`: it kills itself between a decision to commit and its own switch. `stop`: it stops before it votes,
    until somebody continues it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def install(self, register: Callable[..., None], around: Any) -> None:
        register(PLUGIN + "unit.Unit._prepare", self.prepare, around)
        register(PLUGIN + "ballot.Ballot.vote", self.vote, around)
        register(PLUGIN + "unit.Unit._switch", self.switch, around)

    def prepare(self, original: Callable[..., bool], unit: Any, *arguments: Any) -> bool:
        from sglang.srt.runtime_context import get_parallel

        return original(unit, *arguments) and not self._is("refuse", get_parallel().tp_rank)

    def vote(self, original: Callable[..., None], ballot: Any, rank: int, offer: Any) -> None:
        if self._is("die", rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is("stop", rank):
            os.kill(os.getpid(), signal.SIGSTOP)
        original(ballot, rank, None if self._is("vote-no", rank) else offer)

    def switch(self, original: Callable[..., None], unit: Any, *arguments: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        if self._is("die-decided", get_parallel().tp_rank):
            os.kill(os.getpid(), signal.SIGKILL)
        original(unit, *arguments)

    def _is(self, fault: str, rank: int) -> bool:
        return (self._directory / f"{fault}-{rank}").exists()
