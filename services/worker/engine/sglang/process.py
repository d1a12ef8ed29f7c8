"""A server that lives and dies with an engine: its process, with everything it starts, in a session of its own."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Sequence

import structlog

STOP_LIMIT_S = 10.0
"""SGLang drains on SIGTERM for as long as requests run; by the time an engine is closed nobody waits for them."""

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl


class ServerProcess:
    """The command is run as it is. Its output goes where the agent's does."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._logger = structlog.get_logger(component="sglang-server")

    async def start(self) -> None:
        """Errors: OSError if the command cannot be run."""
        assert self._process is None, "a process starts once"
        self._process = await asyncio.create_subprocess_exec(
            *self._command, start_new_session=True, preexec_fn=_die_with_parent
        )
        self._logger.info("launched", pid=self._process.pid, command=self._command[0])

    @property
    def ended(self) -> str | None:
        """How it ended by itself, or None."""
        code = None if self._process is None else self._process.returncode
        return None if code is None else f"the server's process ended with {code}"

    async def stop(self) -> None:
        """End it and its children. Safe to repeat."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            self._logger.warning("killed", pid=self._process.pid)
        # Ranks are children of their own: whatever of the session is left holds GPU memory.
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "there is a process"
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def _die_with_parent() -> None:
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
