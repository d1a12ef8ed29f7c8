"""Child processes that never outlive us and that stop within a limit."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LOG_BYTES_MAX = 32 * 1024 * 1024
"""A log beyond this moves to `<name>.log.1`; with that one, a process keeps at most twice as much."""

POLL_S = 0.005
_PR_SET_PDEATHSIG = 1


class StartFailed(Exception):
    """A server did not start or did not become ready in time. The message ends with what it last logged."""


def spawn(
    argv: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    user: int | None = None,
    cwd: Path | None = None,
    last_signal: signal.Signals = signal.SIGTERM,
) -> "subprocess.Popen[bytes]":
    """Start `argv` with its output appended to `log`, in a session of its own, so that Ctrl-C reaches only us.

    On Linux the kernel sends the child `last_signal` when the thread that called this ends, however it ends: call it from
    the main thread. `user` is a uid (and gid) to run as, for a parent that is root. OSError when `argv` cannot be run.
    """
    rotate_log(log, limit_bytes=0)
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            preexec_fn=_die_with_parent(last_signal),
        )


def stop(process: "subprocess.Popen[bytes]", *, limit_s: float, first_signal: signal.Signals = signal.SIGTERM) -> bool:
    """Ask `process` to end, and after `limit_s` end it and what it started. True if it ended by itself."""
    by_itself = True
    if process.poll() is None:
        process.send_signal(first_signal)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            by_itself = False
    end_group(process)
    return by_itself


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill `process` and every process of its session that still runs, and collect its status."""
    kill_group(process.pid)
    process.wait()


def kill_group(pid: int) -> None:
    """Kill what `spawn` started as `pid`, and what that started in turn, without waiting for the end."""
    # Gone already is as good; macOS answers EPERM for a group of which only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def run_to_end(
    argv: Sequence[str | Path],
    *,
    log: Path,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    user: int | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command that ends by itself and return the end of its output. StartFailed if it fails or takes too long."""
    process = spawn(argv, log=log, env=env, user=user, cwd=cwd)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise StartFailed(f"{argv[0]} took longer than {limit_s:.0f} s; {log} says:\n{tail(log)}") from None
    finally:
        end_group(process)
    if code != 0:
        raise StartFailed(f"{argv[0]} ended with status {code}; {log} says:\n{tail(log)}")
    return tail(log)


def wait_ready(
    what: str, process: "subprocess.Popen[bytes]", ready: Callable[[], bool], *, log: Path, limit_s: float
) -> None:
    """Poll `ready` until it is true. StartFailed if `process` ends first or `limit_s` passes; the process is then ended."""
    deadline = time.monotonic() + limit_s
    while not ready():
        code = process.poll()
        if code is not None:
            raise StartFailed(f"{what} ended with status {code} while starting; {log} says:\n{tail(log)}")
        if time.monotonic() > deadline:
            end_group(process)
            raise StartFailed(f"{what} was not ready within {limit_s:.0f} s; {log} says:\n{tail(log)}")
        time.sleep(POLL_S)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, out of its last 16 KiB."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16 * 1024))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def rotate_log(log: Path, *, limit_bytes: int = LOG_BYTES_MAX) -> None:
    """Move what `log` holds to `<log>.1` once it is larger than the limit. Safe while a process appends to it.

    Where that cannot be done, on a full disk, the log stays as it is: nothing may end for want of a second one.
    """
    with contextlib.suppress(OSError):
        if log.exists() and log.stat().st_size > limit_bytes:
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            # The writer holds the file open in append mode: emptied in place, it goes on at the start.
            os.truncate(log, 0)


def is_running(pid: int) -> bool:
    """Whether `pid` is a live process; one that ended and was not collected yet does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # No /proc (macOS), or gone since: then it runs only where the kernel has no /proc to say otherwise.
        return not Path("/proc/self").exists()


def _die_with_parent(last_signal: signal.Signals) -> Callable[[], None] | None:
    """What the child runs before it becomes the program. Loaded here: after the fork nothing may be imported."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(last_signal))
        if os.getppid() != parent:
            os._exit(1)

    return ask_for_signal
