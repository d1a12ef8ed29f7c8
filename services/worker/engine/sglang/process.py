"""A server that lives and dies with an engine: its process, with everything it starts, in a session of its own."""

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence

import structlog

from shared.runtime.clock import Clock

STOP_LIMIT_S = 10.0
"""SGLang drains on SIGTERM for as long as requests run; by the time an engine is closed nobody waits for them."""

LOOK_S = 0.1
"""Between two looks whether it has ended, while it is being stopped."""

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl


class ServerProcess:
    """The command is run as it is. Its output goes where the agent's does.

    A process that has ended stays a zombie until `stop` has signalled its group for the last time: before that its number,
    which is the group's, can be nobody else's.
    """

    def __init__(self, command: Sequence[str], clock: Clock) -> None:
        self._command, self._clock = command, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._logger = structlog.get_logger(component="sglang-server")

    def start(self) -> None:
        """Errors: OSError if the command cannot be run."""
        assert self._process is None, "a process starts once"
        self._process = subprocess.Popen(  # noqa: S603 - what the operator has set
            self._command, start_new_session=True, preexec_fn=_die_with_parent
        )
        self._logger.info("launched", pid=self._process.pid, command=self._command[0])

    @property
    def ended(self) -> str | None:
        """How it ended by itself, or None."""
        if self._process is None or self._process.returncode is not None:
            return None
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        how = "with" if ended.si_code == os.CLD_EXITED else "by signal"
        return f"the server's process ended {how} {ended.si_status}"

    async def stop(self) -> None:
        """End it and its children. Safe to repeat."""
        if self._process is None or self._process.returncode is not None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        limit_ns = self._clock.monotonic_ns() + round(STOP_LIMIT_S * 1e9)
        while self.ended is None and self._clock.monotonic_ns() < limit_ns:
            await self._clock.sleep(LOOK_S)
        if self.ended is None:
            self._logger.warning("killed", pid=self._process.pid)
        # Ranks are children of their own: whatever of the session is left holds GPU memory.
        os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)


def _die_with_parent() -> None:
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
