"""Whether a process does anything, as the kernel sees it. This tells a hung process from a slow one on any machine.

A rank that computes uses processor time. One that waits for its turn on a crowded processor is runnable, one that reads
weights from a slow disk is in a disk wait; both would go on if the machine let them. One that is asleep or stopped goes on only
if somebody else wakes it.
"""

from pathlib import Path

RUNNABLE, DISK_WAIT = "R", "D"
STOPPED = ("T", "t")
"""By a signal, or by a debugger."""

# Places in /proc/PID/stat behind the name, which may contain anything (proc_pid_stat(5)).
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12


class Activity:
    """One process, looked at from time to time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ticks = -1
        self.stopped = False
        """At the last look."""

    def look(self) -> bool:
        """Whether the process has run since the last look, or would run now if it could. A process that is gone counts as
        active: its end is noticed otherwise."""
        try:
            fields = Path(f"/proc/{self._pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return True
        before, self._ticks = self._ticks, int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        self.stopped = fields[_STATE] in STOPPED
        return self._ticks != before or fields[_STATE] in (RUNNABLE, DISK_WAIT)
