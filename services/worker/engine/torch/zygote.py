"""A process that has torch loaded and nothing else to do: ranks are forked from it, so that they start in milliseconds.

It outlives the engines it serves. That is what makes the restart of a node after a killed rank fast: importing torch takes
seconds, forking a process that has imported it does not. Ranks die with the zygote (PR_SET_PDEATHSIG), the zygote ends when
its socket to the agent closes, and so nothing is left when the agent is killed.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from threading import Lock

from services.worker.engine.protocol import EngineError
from services.worker.engine.torch.activity import Activity
from services.worker.engine.torch.settings import rank_environment
from shared.model.lattice import RANKS_MAX

IMPORT_LIMIT_S = 120.0
LOOK_S, STOPPED_LOOKS_MAX = 1.0, 3
"""While it is silent, it is looked at so often; three looks are the 3 s after which a stopped rank is given up."""

FILES_MAX = 2 * RANKS_MAX + 2
"""The memory of as many prefill and decode ranks, where they meet, and the rank's own socket; the kernel passes 253 at once."""
_PR_SET_PDEATHSIG = 1


class Zygote:
    """The agent's side. Calls block for as long as torch takes to load, so make them from a thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def spawn(self, control: socket.socket, files: Sequence[int]) -> tuple[int, int]:
        """Fork a rank that speaks over `control`. Returns (pid, pidfd); the caller closes the pidfd.

        A zygote that died is started anew; one that does not answer is ended, and with it what it forked. Errors: EngineError
        if it does not come up or cannot fork.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None, "a started zygote is a process"
            assert self._socket is not None, "a started zygote has a socket"
            try:
                socket.send_fds(self._socket, [b"fork"], [control.fileno(), *files])
                reply, pidfds = self._reply(self._socket, Activity(self._process.pid))
            except OSError as error:
                # It may answer yet, and whoever asked next would take another's rank for his own.
                self._end()
                raise EngineError(f"zygote: no answer ({error})") from error
            if not pidfds:
                raise EngineError("zygote: ended while it forked a rank; its standard error says why")
            return int(reply), pidfds[0]

    @staticmethod
    def _reply(requests: socket.socket, activity: Activity) -> tuple[bytes, list[int]]:
        """Errors: TimeoutError if nothing comes, or, like a rank's, its process was stopped by a signal and stays so."""
        stopped_looks = 0
        for _ in range(round(IMPORT_LIMIT_S / LOOK_S)):
            try:
                return socket.recv_fds(requests, 64, 1)[:2]
            except TimeoutError:
                activity.look()
                stopped_looks = stopped_looks + 1 if activity.stopped else 0
                if stopped_looks == STOPPED_LOOKS_MAX:
                    raise TimeoutError("its process was stopped by a signal") from None
        raise TimeoutError(f"it was silent for {IMPORT_LIMIT_S:g} s")

    def close(self) -> None:
        """End the zygote and every rank it forked. Safe to repeat."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(LOOK_S)
        # A session of its own: Ctrl-C in the agent's terminal is for the agent, which then closes the engine in order.
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours


def _main(requests: socket.socket) -> None:
    # Imported before the first fork, for every rank at once. CUDA is left alone until the rank that uses it is there.
    import torch

    from services.worker.engine.torch.rank import run_rank

    # The kernel reaps ranks that end, so none is left as a zombie. Their pidfds tell the agent.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    zygote = os.getpid()
    while True:
        request, files, _, _ = socket.recv_fds(requests, 64, FILES_MAX)
        if not request:
            return
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        assert not begun, "CUDA cannot be used in a process that is forked after it has begun"
        pid = os.fork()
        if pid == 0:
            requests.close()
            _die_with(zygote)
            run_rank(socket.socket(fileno=files[0]), files[1:])
        # The rank waits for its first command, which comes after this reply, so its pid cannot have been reused.
        pidfd = os.pidfd_open(pid)
        socket.send_fds(requests, [str(pid).encode()], [pidfd])
        for file in (pidfd, *files):
            os.close(file)


def _die_with(parent: int) -> None:
    """SIGKILL for this process when its parent ends, even if that has happened by now."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
